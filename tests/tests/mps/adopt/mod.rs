//! Daemons that gpushd adopts. gpushd starts no second daemon while an unreachable daemon still
//! runs.

mod foreign;
mod lost;
