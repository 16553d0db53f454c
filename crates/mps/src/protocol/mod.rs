//! The protocol of `nvidia-cuda-mps-control`, implemented directly.
//!
//! NVIDIA's front-end needs one process for each command. The front-end exits with status 0 for
//! refused commands, and prints nothing while another front-end is connected. So gpushd connects to
//! the daemon's socket itself.
//!
//! ```text
//!   values ──► command ──► wire ──► session ──► control    one command at a time per daemon, with a deadline;
//!   checked    a line      frames   a command              retries while another process is connected;
//!   by types               as bytes and its reply          reads settings back
//!                                        │          └─ front: NVIDIA's front-end, for an unknown protocol
//!   lock: which process is the daemon ◄──┘      holder: which processes are connected
//! ```
//!
//! The daemon does not report invalid values: it sets a memory limit of `512K` as `512M`, and it answers a percentage
//! of 0 with the old value. So the types of [`gpush_api::mps`] check every value before gpushd sends it.

pub mod command;
pub mod control;
pub mod front;
pub mod holder;
pub mod lock;
#[cfg(any(test, feature = "scripted"))]
pub mod scripted;
pub mod server;
pub mod session;
mod sockets;
pub mod version;
pub mod wire;
