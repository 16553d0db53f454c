//! Requests through the admin socket.

/// An extension that marks a request from the admin socket. Only root and the user of gpushd can
/// open that socket.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ThroughAdminSocket;
