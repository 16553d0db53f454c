//! Daemons that gpushd adopts. If gpushd cannot reach a daemon that still runs, it starts no second
//! daemon.

mod foreign;
mod lost;
