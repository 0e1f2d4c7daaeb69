"""Pure functions on tensors: budgets, allocation, prompt maps, columns, patches and attention statistics."""
