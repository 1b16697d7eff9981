"""What the processes of a plane count and measure, and the endpoint that tells Prometheus."""
