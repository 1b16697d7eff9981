"""Optional traces with OpenTelemetry: a trajectory followed from its put to the optimizer step."""
