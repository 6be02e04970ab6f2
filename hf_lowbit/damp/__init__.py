"""DAMP: decay-aware mixed-precision recurrent states (see docs/damp.md)."""
