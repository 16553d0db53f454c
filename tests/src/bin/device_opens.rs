//! Opens a device node many times, and makes a device that really opens.
//!
//! ```text
//! device_opens count NODE NUMBER         opens NODE so often
//! device_opens until NODE END MIDDLE     opens NODE until the file END exists
//! device_opens hold NODE READY SOCKET    opens NODE, creates READY, and passes the descriptor to the next connection
//! device_opens take SOCKET               reads from a passed descriptor, and opens its device again
//! device_opens serve NAME MAJOR MINOR    a character device (CUSE), from which programs read `gpu`
//! ```
//!
//! `count` and `until` print each error number and how often it occurred; 0 is a successful open. `until` prints what it
//! counted before the file MIDDLE existed, and what after.

use std::{
    collections::BTreeMap,
    fs::{File, OpenOptions},
    io::{self, IoSlice, IoSliceMut, Read, Write},
    os::{
        fd::{AsRawFd, FromRawFd, OwnedFd, RawFd},
        unix::net::{UnixListener, UnixStream},
    },
    path::Path,
};

use nix::sys::socket::{ControlMessage, ControlMessageOwned, MsgFlags, recvmsg, sendmsg};

/// How often `until` opens the node before it checks the files again.
const ROUND: u32 = 64;

/// How often each error occurred.
type Counts = BTreeMap<i32, u64>;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments[..] {
        ["count", node, number] => println!("{}", shown(&count(node, number.parse().expect("a number")))),
        ["until", node, end, middle] => until(node, Path::new(end), Path::new(middle)),
        ["hold", node, ready, socket] => hold(node, Path::new(ready), socket),
        ["take", socket] => take(socket),
        ["serve", name, major, minor] => serve(name, major, minor).expect("the kernel answers"),
        _ => panic!("see the first comment"),
    }
}

fn open(node: &str) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).open(node)
}

fn count(node: &str, number: u32) -> Counts {
    let mut counts = Counts::new();
    for _ in 0..number {
        let error = open(node).map_or_else(|error| error.raw_os_error().unwrap_or(-1), |_| 0);
        *counts.entry(error).or_default() += 1;
    }
    counts
}

fn shown(counts: &Counts) -> String {
    let all: Vec<String> = counts.iter().map(|(error, count)| format!("{error}*{count}")).collect();
    all.join(",")
}

fn until(node: &str, end: &Path, middle: &Path) {
    let (mut before, mut after) = (Counts::new(), Counts::new());
    while !end.exists() {
        let counts = if middle.exists() { &mut after } else { &mut before };
        for (error, number) in count(node, ROUND) {
            *counts.entry(error).or_default() += number;
        }
    }
    println!("{} {}", shown(&before), shown(&after));
}

/// Prints what a read from a held descriptor returns, and what an open of the same device returns.
fn print_access(held: &mut File) {
    let mut content = [0; 3];
    let read = match held.read(&mut content) {
        Ok(length) => String::from_utf8_lossy(&content[..length]).into_owned(),
        Err(error) => error.to_string(),
    };
    let again = format!("/proc/self/fd/{}", held.as_raw_fd());
    println!("read {read}, opened again {}", shown(&count(&again, 1)));
}

fn hold(node: &str, ready: &Path, socket: &str) {
    let mut held = open(node).expect("the first open is allowed");
    let listener = UnixListener::bind(socket).expect("a new socket");
    File::create(ready).expect("a new file");
    let (client, _) = listener.accept().expect("a connection");
    let descriptors = [held.as_raw_fd()];
    let message = [ControlMessage::ScmRights(&descriptors)];
    sendmsg::<()>(client.as_raw_fd(), &[IoSlice::new(b"d")], &message, MsgFlags::empty(), None).expect("a descriptor");
    print_access(&mut held);
}

fn take(socket: &str) {
    let holder = UnixStream::connect(socket).expect("the holder listens");
    let (mut content, mut space) = ([0; 1], nix::cmsg_space!([RawFd; 1]));
    let mut content = [IoSliceMut::new(&mut content)];
    let received = recvmsg::<()>(holder.as_raw_fd(), &mut content, Some(&mut space), MsgFlags::empty());
    let received = received.expect("a message");
    for message in received.cmsgs().expect("all of the message") {
        if let ControlMessageOwned::ScmRights(descriptors) = message {
            #[expect(unsafe_code, reason = "nix returns received descriptors as numbers")]
            // SAFETY: the kernel has just created the descriptor for this process, and nothing else uses it.
            let descriptor = unsafe { OwnedFd::from_raw_fd(descriptors[0]) };
            print_access(&mut File::from(descriptor));
        }
    }
}

/// Operations of the kernel's FUSE protocol.
const OPEN: u32 = 14;
const READ: u32 = 15;
const RELEASE: u32 = 18;
const FLUSH: u32 = 25;
const INTERRUPT: u32 = 36;
const DESTROY: u32 = 38;
const CUSE_INIT: u32 = 4096;

/// Length of the header of each request.
const HEADER: usize = 40;

/// `ENOTTY`, the answer to all other requests.
const NOT_SUPPORTED: i32 = -25;

/// Serves a character device. Its name and its numbers appear in `/proc/devices`.
fn serve(name: &str, major: &str, minor: &str) -> io::Result<()> {
    let numbers: Vec<u32> = [major, minor].iter().map(|number| number.parse().expect("a number")).collect();
    let mut cuse = OpenOptions::new().read(true).write(true).open("/dev/cuse")?;
    let mut request = vec![0; 1 << 17];
    loop {
        let length = cuse.read(&mut request)?;
        let word = |at: usize| u32::from_ne_bytes(request[at..at + 4].try_into().expect("four bytes"));
        assert!(length >= HEADER, "a request of {length} bytes");
        let (mut error, mut content) = (0, Vec::new());
        match word(4) {
            CUSE_INIT => {
                // The versions of the protocol, then: unused, flags, most bytes of a read and of a write, the numbers.
                let head = [word(HEADER), word(HEADER + 4), 0, 0, 1 << 16, 1 << 16, numbers[0], numbers[1]];
                content.extend(head.iter().flat_map(|number| number.to_ne_bytes()));
                content.extend([0; 40]);
                content.extend(format!("DEVNAME={name}\0").bytes());
            }
            OPEN => content.extend([1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]),
            READ => content.extend(b"gpu"),
            RELEASE | FLUSH => {}
            INTERRUPT => continue,
            DESTROY => return Ok(()),
            _ => error = NOT_SUPPORTED,
        }
        let mut answer = u32::try_from(16 + content.len()).map_err(io::Error::other)?.to_ne_bytes().to_vec();
        answer.extend(error.to_ne_bytes());
        answer.extend(&request[8..16]);
        answer.extend(content);
        // If the caller was killed, the kernel does not wait for the answer.
        let _ = cuse.write(&answer);
    }
}
