//! The bytes on the daemon's socket (AF_UNIX, SEQPACKET, little-endian), as recorded with versions 535, 550 and 555.
//!
//! ```text
//! daemon ► OUTBHELL\0                       with its pid and uid (SO_PASSCRED)
//! gpushd ► OUTBCRED\0 + its credentials     (SCM_CREDENTIALS)
//! gpushd ► u32 4                            its kind: a user interface
//! gpushd ► u64 length, then `command\n\0`   the length counts the NUL
//! daemon ► u32 0, text                      any number of frames; none for an empty reply
//! gpushd ► u64 0                            no more commands
//! daemon ► u32 1, i32 status                then it closes
//! ```
//!
//! An empty reply has no frame, so only the status frame ends a reply. gpushd sends one command per session.

/// The daemon's greeting.
pub const HELLO: &[u8] = b"OUTBHELL\0";

/// The frame that carries gpushd's credentials.
pub const CREDENTIALS: &[u8] = b"OUTBCRED\0";

/// Identifies gpushd as a user interface.
pub const USER_INTERFACE: [u8; 4] = 4_u32.to_le_bytes();

/// Announces that no more commands follow.
pub const NO_MORE: [u8; 8] = 0_u64.to_le_bytes();

/// Size of the largest frame that gpushd reads. A frame of a reply has only a few lines.
pub const LARGEST_FRAME: usize = 64 << 10;

/// Maximum length of a command line. Some daemons end if the announced length is much larger than
/// the data that follows it.
pub const LONGEST_COMMAND: usize = 512;

/// Returns the two frames of a command; `None` if the line is not a valid command.
#[must_use]
pub fn command(line: &str) -> Option<([u8; 8], Vec<u8>)> {
    let plain = !line.is_empty() && line.len() <= LONGEST_COMMAND && line.bytes().all(|b| (b' '..=b'~').contains(&b));
    if !plain {
        return None;
    }
    let body = [line.as_bytes(), b"\n\0"].concat();
    Some(((body.len() as u64).to_le_bytes(), body))
}

/// A frame from the daemon.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Frame {
    /// A part of the reply.
    Text(String),
    /// The end of the reply; status 0 means success.
    Status(i32),
}

/// Parses a frame; `None` if its kind is unknown.
#[must_use]
pub fn frame(bytes: &[u8]) -> Option<Frame> {
    let (kind, rest) = bytes.split_first_chunk::<4>()?;
    match u32::from_le_bytes(*kind) {
        0 => {
            let text = rest.split(|byte| *byte == 0).next().unwrap_or_default();
            Some(Frame::Text(String::from_utf8_lossy(text).into_owned()))
        }
        1 => Some(Frame::Status(i32::from_le_bytes(rest.try_into().ok()?))),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn command_frame_has_length_with_nul() {
        let (length, body) = command("get_server_list").unwrap();
        assert_eq!((length, body.as_slice()), (17_u64.to_le_bytes(), b"get_server_list\n\0".as_slice()));
        for bad in ["", "a\nb", "a\0", "ä", &"x".repeat(LONGEST_COMMAND + 1)] {
            assert_eq!(command(bad), None, "{bad:?}");
        }
    }

    #[test]
    fn recorded_frames_are_parsed() {
        assert_eq!(frame(b"\0\0\0\x0033.4"), Some(Frame::Text("33.4".to_owned())));
        assert_eq!(frame(b"\0\0\0\0"), Some(Frame::Text(String::new())));
        assert_eq!(frame(b"\x01\0\0\0\0\0\0\0"), Some(Frame::Status(0)));
        assert_eq!(frame(b"\x01\0\0\0\xff\xff\xff\xff"), Some(Frame::Status(-1)));
        for foreign in [b"".as_slice(), b"\0\0", b"\x01\0\0\0\0", b"\x07\0\0\0\0\0\0\0", HELLO] {
            assert_eq!(frame(foreign), None, "{foreign:?}");
        }
    }

    proptest! {
        #[test]
        fn frame_parser_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..64)) {
            let _ = frame(&bytes);
        }
    }
}
