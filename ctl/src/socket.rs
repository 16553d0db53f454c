//! The socket on which gpushctl reaches gpushd.

use gpush_client::{Origin, Socket};

use crate::args::Global;

/// Returns the socket of gpushd: `--socket`, else `GPUSH_SOCKET`, else the socket of the system's or the user's gpushd.
pub(crate) fn chosen(global: &Global) -> Socket {
    if let Some(path) = &global.socket {
        return Socket::given(path, Origin::Option);
    }
    default()
}

/// Returns the socket of gpushd if `--socket` is not given.
pub(crate) fn default() -> Socket {
    Socket::of_environment()
}
