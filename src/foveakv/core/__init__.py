"""Pure functions on tensors: budgets, allocation, prompt maps, columns, patches, attention statistics."""
