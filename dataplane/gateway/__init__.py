"""The plane for who is outside: a gRPC server that checks, and then is an ordinary client."""
