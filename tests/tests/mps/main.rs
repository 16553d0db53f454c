//! MPS with the real gpushd and gpushctl. The tests use a simulated control daemon, and also
//! NVIDIA's control daemon if it is installed. The servers and clients are simulated.

mod access;
mod adopt;
mod control_connection;
mod daemons;
mod faults;
mod hung_gpu;
mod in_use;
mod kills;
mod leases;
mod mode_changes;
mod multi_user;
mod shown_log;
