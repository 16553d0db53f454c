//! gpushd on a real systemd, in a container: units, sandbox, MPS daemons as services.

mod bad_config;
mod doctor;
mod drains;
mod enforcement;
mod host;
mod leases;
mod mps;
mod order;
mod packages;
mod ready;
mod slurm;
mod units;
