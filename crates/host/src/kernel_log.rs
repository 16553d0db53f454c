//! The kernel log, for the processes that caused Xid errors.
//!
//! The driver reports an Xid error without its process. But its message in the kernel log often names the process:
//!
//! ```text
//! NVRM: Xid (PCI:0000:3b:00): 31, pid=4711, name=python, Ch 00000008, intr 00000000. MMU Fault: …
//! ```
//!
//! Root can write into the kernel log too. So only records of the kernel itself count: the kernel gives its own records
//! the facility 0, and does not let programs use it.

use std::{
    collections::VecDeque,
    fmt,
    fs::OpenOptions,
    io::{self, Read, Seek, SeekFrom},
    os::unix::fs::OpenOptionsExt,
};

use nix::libc::{EPIPE, O_NONBLOCK};

/// The device of the kernel log.
const DEVICE: &str = "/dev/kmsg";

/// Maximum number of records that one call reads. The buffer of the kernel may contain more.
const MOST_RECORDS: usize = 4096;

/// Maximum number of messages without a report of the driver that are kept.
const MOST_KEPT: usize = 64;

/// Maximum size of a record, which a read returns as a whole.
const RECORD: usize = 8192;

/// A message about an Xid error.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct XidMessage {
    /// PCI domain, bus and device of the GPU.
    pub address: PciAddress,
    /// Xid number.
    pub xid: u64,
    /// Process that caused the error, if the message names one.
    pub pid: Option<u32>,
    /// Name of the process. The process chooses it.
    pub name: Option<String>,
}

impl XidMessage {
    /// Returns the process in words, for a log: `, caused by process 4711 (python)`. Empty without a process.
    pub fn caused_by(&self) -> String {
        match (self.pid, &self.name) {
            (None, _) => String::new(),
            (Some(pid), None) => format!(", caused by process {pid}"),
            (Some(pid), Some(name)) => format!(", caused by process {pid} ({name})"),
        }
    }
}

/// PCI domain, bus and device.
pub type PciAddress = (u32, u8, u8);

/// The messages about Xid errors since a time.
pub struct KernelLog {
    records: Box<dyn Read + Send>,
    /// Messages that no report of the driver has used yet, oldest first.
    kept: VecDeque<XidMessage>,
}

impl KernelLog {
    /// Opens the kernel log at its end.
    ///
    /// # Errors
    /// The log cannot be read: in a container, or without `CAP_SYSLOG`.
    pub fn open() -> io::Result<Self> {
        let mut records = OpenOptions::new().read(true).custom_flags(O_NONBLOCK).open(DEVICE)?;
        records.seek(SeekFrom::End(0))?;
        Ok(Self::of(records))
    }

    /// Returns a log whose records are read from here: one record with each read, which does not block.
    pub fn of(records: impl Read + Send + 'static) -> Self {
        Self { records: Box::new(records), kept: VecDeque::new() }
    }

    /// Returns the oldest message about this Xid error of a GPU that was not returned before. Reads the records since the
    /// last call. Does not block.
    pub fn take(&mut self, address: PciAddress, xid: u64) -> Option<XidMessage> {
        let new = messages(&mut self.records);
        self.kept.extend(new);
        let surplus = self.kept.len().saturating_sub(MOST_KEPT);
        self.kept.drain(..surplus);
        let at = self.kept.iter().position(|message| (message.address, message.xid) == (address, xid))?;
        self.kept.remove(at)
    }
}

impl fmt::Debug for KernelLog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KernelLog").field("kept", &self.kept).finish_non_exhaustive()
    }
}

/// Reads records to the end, and returns those about Xid errors.
fn messages(records: &mut impl Read) -> Vec<XidMessage> {
    let (mut found, mut record) = (Vec::new(), vec![0; RECORD]);
    for _ in 0..MOST_RECORDS {
        match records.read(&mut record) {
            Ok(0) => break,
            Ok(length) => found.extend(message(&String::from_utf8_lossy(&record[..length]))),
            // The kernel has overwritten records. The next read returns the oldest one that is left.
            Err(error) if error.raw_os_error() == Some(EPIPE) => {}
            // Without a further record, the error is `WouldBlock`. After another error, the records come with the next call.
            Err(_) => break,
        }
    }
    found
}

/// Parses a record: `PRIORITY,SEQUENCE,TIME,FLAGS;TEXT`.
fn message(record: &str) -> Option<XidMessage> {
    let (prefix, text) = record.split_once(';')?;
    let priority: u32 = prefix.split(',').next()?.parse().ok()?;
    let is_of_kernel = priority >> 3 == 0;
    if is_of_kernel { xid_message(text.lines().next()?) } else { None }
}

/// Parses the text of a message about an Xid error; `None` for other messages.
fn xid_message(text: &str) -> Option<XidMessage> {
    let rest = text.strip_prefix("NVRM: Xid (PCI:")?;
    let (place, rest) = rest.split_once("): ")?;
    // With MIG, the GPU instance follows the address: `0000:3b:00 GPU-I:05`.
    let address = pci_address(place.split_whitespace().next()?)?;
    let mut parts = rest.split(", ");
    let xid = parts.next()?.trim_end_matches(',').parse().ok()?;
    let (mut pid, mut name) = (None, None);
    for part in parts {
        match part.split_once('=') {
            Some(("pid", value)) => pid = value.trim_matches('\'').parse().ok(),
            Some(("name", value)) => name = (!value.contains("<unknown>")).then(|| value.trim_matches('\'').to_owned()),
            // The description of the error follows.
            _ => break,
        }
    }
    Some(XidMessage { address, xid, pid, name })
}

/// Parses a PCI address such as `0000:3b:00`, `00000000:3B:00.0` or `0000:3b:00.0`.
pub fn pci_address(text: &str) -> Option<PciAddress> {
    let mut parts = text.split(':');
    let domain = u32::from_str_radix(parts.next()?, 16).ok()?;
    let bus = u8::from_str_radix(parts.next()?, 16).ok()?;
    let device = u8::from_str_radix(parts.next()?.split('.').next()?, 16).ok()?;
    parts.next().is_none().then_some((domain, bus, device))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const GPU: PciAddress = (0, 0x3b, 0);

    /// Messages of several drivers.
    #[test]
    fn process_of_an_xid_is_read() {
        let of =
            |xid, pid, name: Option<&str>| Some(XidMessage { address: GPU, xid, pid, name: name.map(str::to_owned) });
        for (text, expected) in [
            (
                "NVRM: Xid (PCI:0000:3b:00): 31, pid=4711, name=python, Ch 00000008, intr 00000000. MMU Fault: ENGINE \
                 GRAPHICS",
                of(31, Some(4711), Some("python")),
            ),
            (
                "NVRM: Xid (PCI:0000:3b:00): 13, pid=4711, Graphics Exception: ESR 0x504224=0x80000000",
                of(13, Some(4711), None),
            ),
            ("NVRM: Xid (PCI:0000:3b:00 GPU-I:05): 43, pid=12, name=a, Ch 00000010", of(43, Some(12), Some("a"))),
            (
                "NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
                of(79, None, None),
            ),
            ("NVRM: Xid (PCI:0000:3b:00): 119, Timeout after 6s of waiting for RPC response", of(119, None, None)),
            ("NVRM: GPU at PCI:0000:3b:00: GPU-1c6a", None),
            ("usb 1-1: new device", None),
            ("NVRM: Xid (PCI:0000:3b:00): many", None),
            ("NVRM: Xid (PCI:0000:3b): 31", None),
        ] {
            assert_eq!(xid_message(text), expected, "{text}");
        }
    }

    /// A program of root can write such a text, but not with the facility of the kernel.
    #[test]
    fn record_of_a_program_is_ignored() {
        let text = "NVRM: Xid (PCI:0000:3b:00): 31, pid=1, name=x";
        let found = |prefix: &str| message(&format!("{prefix};{text}\n SUBSYSTEM=pci\n")).is_some();
        assert!(found("3,1234,5678,-"));
        assert!(!found("12,1234,5678,-"), "facility 1");
        assert!(!found("x,1234,5678,-"));
    }

    #[test]
    fn addresses_of_driver_and_kernel_are_compared_as_numbers() {
        for text in ["0000:3b:00", "00000000:3B:00.0", "0000:3b:00.0"] {
            assert_eq!(pci_address(text), Some(GPU), "{text}");
        }
        assert_eq!(pci_address("3b:00"), None);
    }

    /// Returns records one by one, as the device does.
    struct Records(VecDeque<io::Result<String>>);

    impl Read for Records {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            let record = self.0.pop_front().unwrap_or_else(|| Err(io::ErrorKind::WouldBlock.into()))?;
            buffer[..record.len()].copy_from_slice(record.as_bytes());
            Ok(record.len())
        }
    }

    #[test]
    fn records_are_read_to_the_end_over_lost_ones() {
        let record = |xid: u32| format!("3,1,2,-;NVRM: Xid (PCI:0000:3b:00): {xid}, pid=7, name=a\n");
        let lost = io::Error::from_raw_os_error(EPIPE);
        let mut records =
            Records(VecDeque::from([Ok(record(31)), Err(lost), Ok("6,1,2,-;other\n".to_owned()), Ok(record(13))]));
        assert_eq!(messages(&mut records).iter().map(|message| message.xid).collect::<Vec<_>>(), [31, 13]);
    }

    proptest! {
        #[test]
        fn no_text_makes_the_parser_panic(record in "\\PC{0,80}", rest in "\\PC{0,80}") {
            let _ = message(&record);
            let _ = message(&format!("3,1,2,-;NVRM: Xid (PCI:{record}): {rest}"));
        }
    }
}
