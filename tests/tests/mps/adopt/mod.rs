//! Which running daemons gpushd adopts. It starts no second daemon while an unreachable one still runs.

mod foreign;
mod lost;
