"""Clients of a plane: one set of verbs, a blocking and an asyncio face."""
