"""Workers in processes: in this one, or in many by Ray."""
