//! The harness of the end-to-end tests: a simulated host, gpushd on it, and commands that use both.

pub mod agent;
pub mod around;
pub mod description;
pub mod driver;
pub mod fixture;
pub mod gpu;
pub mod host;
pub mod hung_gpu;
pub mod machine;
pub mod mps;
pub mod page;
pub mod random;
pub mod slurm;
pub mod smi;
pub mod strace;
pub mod tools;
