//! Whom gpushd goes on with as a daemon of its own, whom it does not, and that it starts none beside one that
//! nobody can reach any more.

mod foreign;
mod lost;
