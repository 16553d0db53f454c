//! Requests through the admin socket.

/// Marks a request that came through the admin socket, in its extensions. Only root and the user of gpushd can open it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ThroughAdminSocket;
