"""What a trace and budgets ask of a planner: periods in which blocks are idle, routes, capacities, updates."""
