//! `nvidia-cuda-mps-control`, the daemon that lets processes share a GPU, spoken to directly.
//!
//! NVIDIA's front-end is a process per command that returns 0 for what was refused, and prints nothing
//! when another one has the daemon's only ear. So this crate speaks the daemon's socket itself.
//!
//! ```text
//!            values ──► command ──► wire ──► session ──► control       one actor a daemon, in turn
//!            checked    a line      frames   one question   deadline, again while another has its ear,
//!            by us                  as bytes one answer     what was set is read back
//!                                                   │              └─ front, for a foreign protocol
//!            lock: who the daemon of a directory is ┘      holder: who is connected to it
//! ```
//!
//! The daemon accepts nonsense without a word (`512K` of memory becomes `512M`, 0 percent prints the old
//! value): whatever reaches it has passed the types of [`gpush_api::mps`]. Nothing here starts a daemon, and none ends unless it is told `quit`.

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
