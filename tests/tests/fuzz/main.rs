//! Fuzz targets: random bytes for every parser that reads text of users, of Slurm, of the kernel or of another program.
//!
//! | module | subject |
//! |---|---|
//! | `runner` | gives a target the files of its corpus, then mutated inputs |
//! | `mutator` | mutations of an input |
//! | `requests` | bodies, lease requests, selectors, layouts, values |
//! | `files` | config, mig-parted files, files of Slurm |
//! | `processes` | `/proc`, cgroups, MPS frames and logs, frames of the driver worker |
//!
//! `corpus/TARGET` contains the inputs of a target, one in each file. To keep an input that has failed, copy the file
//! that the message names into this directory, and give it a name that says what it shows.
//!
//! `cargo test` tries some thousand inputs for each target. `cargo xtask soak` runs each target for a minute.

mod files;
mod mutator;
mod processes;
mod requests;
mod runner;
