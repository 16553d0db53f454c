//! Reads from the kernel log which processes caused Xid errors.
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
    fmt,
    fs::OpenOptions,
    io::{self, Read, Seek, SeekFrom},
    os::unix::fs::OpenOptionsExt,
    time::Duration,
};

use nix::libc::{EPIPE, O_NONBLOCK};

/// The device of the kernel log.
const DEVICE: &str = "/dev/kmsg";

/// Maximum number of records that one call reads. The buffer of the kernel contains fewer, unless programs write all the time.
const MOST_RECORDS: usize = 1 << 20;

/// How long a message can belong to a report of the driver, which follows it.
const FRESH: Duration = Duration::from_secs(10);

/// Maximum size of a record, which a read returns as a whole.
const RECORD: usize = 8192;

/// A message about an Xid error.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct XidMessage {
    /// Time since the boot.
    pub at: Duration,
    /// PCI domain, bus and device of the GPU.
    pub address: PciAddress,
    /// Xid number.
    pub xid: u64,
    /// Process that caused the error, if the message names one.
    pub pid: Option<u32>,
    /// Name of the process. The process chooses it.
    pub name: Option<String>,
}

/// PCI domain, bus and device.
pub type PciAddress = (u32, u8, u8);

/// The messages about Xid errors since a time.
pub struct KernelLog {
    records: Box<dyn Read + Send>,
    /// Messages that do not belong to a report of the driver yet, oldest first.
    kept: Vec<XidMessage>,
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

    /// Returns a log that reads its records from `records`: one record with each read, which does not block.
    pub fn of(records: impl Read + Send + 'static) -> Self {
        Self { records: Box::new(records), kept: Vec::new() }
    }

    /// Returns the message about this Xid error of a GPU. `now` is the time since the boot. Reads the records since the
    /// last call, and does not wait for more. Returns `None` if there is no message of the last 10 s, or if such
    /// messages name several processes: then it is not known which process this report is about.
    pub fn take(&mut self, address: PciAddress, xid: u64, now: Duration) -> Option<XidMessage> {
        self.kept.extend(messages(&mut self.records));
        self.kept.retain(|message| now.saturating_sub(message.at) <= FRESH);
        let is_meant = |message: &mut XidMessage| (message.address, message.xid) == (address, xid);
        let meant: Vec<XidMessage> = self.kept.extract_if(.., is_meant).collect();
        let last = meant.last()?;
        meant.iter().all(|one| one.pid == last.pid).then(|| last.clone())
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
    let mut fields = prefix.split(',');
    let priority: u32 = fields.next()?.parse().ok()?;
    let at = Duration::from_micros(fields.nth(1)?.parse().ok()?);
    let is_of_kernel = priority >> 3 == 0;
    if is_of_kernel { xid_message(text.lines().next()?, at) } else { None }
}

/// Parses the text of a message about an Xid error; `None` for other messages. A process can choose a name that looks like
/// another field, so nothing after the name is read.
fn xid_message(text: &str, at: Duration) -> Option<XidMessage> {
    let rest = text.strip_prefix("NVRM: Xid (PCI:")?;
    let (place, rest) = rest.split_once("): ")?;
    // With MIG, the GPU instance follows the address: `0000:3b:00 GPU-I:05`.
    let address = pci_address(place.split_whitespace().next()?)?;
    let mut parts = rest.split(", ");
    let xid = parts.next()?.trim_end_matches(',').parse().ok()?;
    let field = |part: Option<&str>, key: &str| {
        let (name, value) = part?.split_once('=')?;
        (name == key && !value.contains("<unknown>")).then(|| value.trim_matches('\'').to_owned())
    };
    let pid = field(parts.next(), "pid").and_then(|pid| pid.parse().ok());
    let name = field(parts.next(), "name");
    Some(XidMessage { at, address, xid, pid, name })
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
    use std::collections::VecDeque;

    use proptest::prelude::*;

    use super::*;

    const GPU: PciAddress = (0, 0x3b, 0);
    const AT: Duration = Duration::from_secs(100);

    /// Messages of several drivers.
    #[test]
    fn process_of_an_xid_is_read() {
        let of = |xid, pid, name: Option<&str>| {
            Some(XidMessage { at: AT, address: GPU, xid, pid, name: name.map(str::to_owned) })
        };
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
            // Fault: a process could name another one, because a later field replaced an earlier one.
            ("NVRM: Xid (PCI:0000:3b:00): 31, pid=4711, name=a, pid=1, Ch 8", of(31, Some(4711), Some("a"))),
            ("NVRM: GPU at PCI:0000:3b:00: GPU-1c6a", None),
            ("usb 1-1: new device", None),
            ("NVRM: Xid (PCI:0000:3b:00): many", None),
            ("NVRM: Xid (PCI:0000:3b): 31", None),
        ] {
            assert_eq!(xid_message(text, AT), expected, "{text}");
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

    /// Returns a record of a time in seconds.
    fn record(at: u64, bus: &str, xid: u32, pid: u32) -> io::Result<String> {
        Ok(format!("3,1,{},-;NVRM: Xid (PCI:0000:{bus}:00): {xid}, pid={pid}, name=a\n", at * 1_000_000))
    }

    fn log(records: impl IntoIterator<Item = io::Result<String>>) -> KernelLog {
        KernelLog::of(Records(records.into_iter().collect()))
    }

    #[test]
    fn records_are_read_to_the_end_over_lost_ones() {
        let lost = io::Error::from_raw_os_error(EPIPE);
        let mut log =
            log([record(99, "3b", 31, 7), Err(lost), Ok("6,1,2,-;other\n".to_owned()), record(99, "3b", 13, 8)]);
        assert_eq!(log.take(GPU, 13, AT).and_then(|message| message.pid), Some(8));
        assert_eq!(log.take(GPU, 31, AT).and_then(|message| message.pid), Some(7));
        assert_eq!(log.take(GPU, 31, AT), None, "each message is used once");
    }

    #[test]
    fn message_of_another_gpu_or_xid_is_kept() {
        let mut log = log([record(99, "3c", 31, 7), record(99, "3b", 13, 8)]);
        assert_eq!(log.take(GPU, 31, AT), None);
        assert_eq!(log.take((0, 0x3c, 0), 31, AT).and_then(|message| message.pid), Some(7));
    }

    /// Fault: an unused message was matched with a later report about another process.
    #[test]
    fn old_and_ambiguous_messages_name_no_process() {
        let mut log = log([record(80, "3b", 13, 1), record(95, "3b", 31, 2), record(96, "3b", 31, 3)]);
        assert_eq!(log.take(GPU, 13, AT), None, "20 s old");
        assert_eq!(log.take(GPU, 31, AT), None, "two processes");
        assert_eq!(log.take(GPU, 31, AT), None);
    }

    proptest! {
        #[test]
        fn no_text_makes_the_parser_panic(record in "\\PC{0,80}", rest in "\\PC{0,80}") {
            let _ = message(&record);
            let _ = message(&format!("3,1,2,-;NVRM: Xid (PCI:{record}): {rest}"));
        }
    }
}
