"""What runs beside the model: gateway, jobs, and the engine and trainer that they supervise."""
