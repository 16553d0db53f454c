//! A simulated host under test.
