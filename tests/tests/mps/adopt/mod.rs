//! Daemons that gpushd adopts. It starts no second daemon while an unreachable daemon still runs.

mod foreign;
mod lost;
