"""Who may call a gateway, and how much: tokens, certificates, grants, limits."""
