//! Requests through the admin socket.

/// Marks a request that came through the admin socket. Only root and the user that gpushd runs as
/// can open that socket.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ThroughAdminSocket;
