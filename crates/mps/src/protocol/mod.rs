//! The protocol of `nvidia-cuda-mps-control`, spoken directly.
//!
//! NVIDIA's front-end is one process per command. It returns 0 for refused commands, and prints nothing while another
//! front-end is connected. So gpushd speaks the daemon's socket itself.
//!
//! ```text
//!   values ──► command ──► wire ──► session ──► control    one command at a time per daemon, with a deadline;
//!   checked    a line      frames   a command              retries while another process is connected;
//!   by types               as bytes and its reply          reads settings back
//!                                        │          └─ front: NVIDIA's front-end, for an unknown protocol
//!   lock: which process is the daemon ◄──┘      holder: which processes are connected
//! ```
//!
//! The daemon accepts invalid values silently: `512K` of memory becomes `512M`, and 0 percent prints the old value. So
//! every value that reaches it has passed the types of [`gpush_api::mps`].

pub mod command;
pub mod control;
pub mod front;
pub mod holder;
pub mod lock;
pub mod server;
pub mod session;
mod sockets;
pub mod version;
pub mod wire;
