"""Key providers behind one interface."""
