//! A `gpushd` under test.
