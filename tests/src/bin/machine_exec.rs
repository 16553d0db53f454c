//! Runs commands in a virtual machine. The same program runs on the host and in the machine.
//!
//! ```text
//! machine_exec run PORT PROGRAM [ARGUMENT…]   on the host: like PROGRAM, with its input, output and status
//! machine_exec serve PORT                     in the machine: one connection for each command
//! ```
//!
//! Both sides send frames: a byte for the kind, the length as four bytes, and the content. The command gets the
//! environment of the client. If the client ends first, its command is killed.

use std::{
    collections::BTreeMap,
    ffi::OsString,
    fs,
    io::{self, Read, Write},
    net::{Ipv4Addr, Shutdown, TcpListener, TcpStream},
    os::unix::{
        ffi::{OsStrExt, OsStringExt},
        process::{CommandExt, ExitStatusExt},
    },
    path::Path,
    process::{Child, Command, ExitCode, Stdio},
    sync::Mutex,
    thread,
};

/// Kinds of frames from the client.
const ARGUMENT: u8 = b'a';
const VARIABLE: u8 = b'v';
const START: u8 = b's';
/// Standard input; without content, its end.
const INPUT: u8 = b'i';

/// Kinds of frames to the client.
const OUTPUT: u8 = b'o';
const ERROR: u8 = b'e';
/// The exit status, as text. It is the last frame.
const STATUS: u8 = b'x';

/// Maximum length of the content of a frame.
const MAXIMUM: usize = 1 << 16;

/// The exit status if the machine cannot be reached, or ends first.
const NO_MACHINE: u8 = 255;

/// The cgroup of commands in the machine. It belongs to no unit of systemd.
const CGROUP: &str = "/sys/fs/cgroup/from-host";

fn main() -> ExitCode {
    let arguments: Vec<OsString> = std::env::args_os().skip(1).collect();
    let [verb, port, command @ ..] = arguments.as_slice() else { panic!("see the first comment") };
    let port = port.to_str().and_then(|port| port.parse().ok()).expect("a port");
    match verb.to_str() {
        Some("run") => match run(port, command) {
            Ok(status) => ExitCode::from(status),
            Err(error) => {
                eprintln!("machine_exec: the machine at port {port} does not answer: {error}");
                ExitCode::from(NO_MACHINE)
            }
        },
        Some("serve") => serve(port),
        other => panic!("unknown verb {other:?}"),
    }
}

fn send(to: &mut impl Write, kind: u8, content: &[u8]) -> io::Result<()> {
    let length = u32::try_from(content.len()).map_err(io::Error::other)?;
    let mut frame = vec![kind];
    frame.extend(length.to_be_bytes());
    frame.extend(content);
    to.write_all(&frame)
}

fn receive(from: &mut impl Read) -> io::Result<(u8, Vec<u8>)> {
    let mut head = [0; 5];
    from.read_exact(&mut head)?;
    let length = u32::from_be_bytes([head[1], head[2], head[3], head[4]]) as usize;
    if length > MAXIMUM {
        return Err(io::Error::other("a frame is too long"));
    }
    let mut content = vec![0; length];
    from.read_exact(&mut content)?;
    Ok((head[0], content))
}

/// Sends what a stream contains, in frames of one kind.
fn forward(from: &mut impl Read, kind: u8, mut take: impl FnMut(u8, &[u8]) -> io::Result<()>) {
    let mut buffer = vec![0; MAXIMUM];
    while let Ok(length) = from.read(&mut buffer) {
        if length == 0 || take(kind, &buffer[..length]).is_err() {
            break;
        }
    }
}

/// Runs a command in the machine. Returns its exit status.
fn run(port: u16, command: &[OsString]) -> io::Result<u8> {
    let mut machine = TcpStream::connect((Ipv4Addr::LOCALHOST, port))?;
    machine.set_nodelay(true)?;
    for argument in command {
        send(&mut machine, ARGUMENT, argument.as_bytes())?;
    }
    for (name, value) in std::env::vars_os() {
        send(&mut machine, VARIABLE, &[name.as_bytes(), b"=", value.as_bytes()].concat())?;
    }
    send(&mut machine, START, &[])?;
    let mut input = machine.try_clone()?;
    // The process ends when the command has ended, also while this thread still reads.
    thread::spawn(move || {
        forward(&mut io::stdin(), INPUT, |kind, content| send(&mut input, kind, content));
        let _ = send(&mut input, INPUT, &[]);
    });
    loop {
        let (kind, content) = receive(&mut machine)?;
        match kind {
            OUTPUT => io::stdout().write_all(&content).and_then(|()| io::stdout().flush())?,
            ERROR => io::stderr().write_all(&content)?,
            STATUS => return String::from_utf8_lossy(&content).parse().map_err(io::Error::other),
            other => return Err(io::Error::other(format!("unknown frame {other}"))),
        }
    }
}

/// Serves commands until the machine stops.
fn serve(port: u16) -> ! {
    let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)).expect("a free port");
    loop {
        // systemd moves this process when it starts. Commands must not be in a unit, so move it again.
        if Path::new(CGROUP).parent().is_some_and(|root| root.join("init.scope").exists()) {
            let _ = fs::create_dir(CGROUP);
            let _ = fs::write(format!("{CGROUP}/cgroup.procs"), std::process::id().to_string());
        }
        if let Ok((client, _)) = listener.accept() {
            thread::spawn(move || {
                let _ = client.set_nodelay(true);
                if let Err(error) = execute(&client) {
                    eprintln!("machine_exec: {error}");
                }
                let _ = client.shutdown(Shutdown::Both);
            });
        }
    }
}

/// Executes the command of one connection.
fn execute(client: &TcpStream) -> io::Result<()> {
    let (mut from, to) = (client.try_clone()?, Mutex::new(client.try_clone()?));
    let answer = |kind, content: &[u8]| send(&mut *to.lock().expect("no thread panics"), kind, content);
    let Some(mut command) = request(&mut from)? else { return Ok(()) };
    let mut child = match command.spawn() {
        Ok(child) => child,
        Err(error) => {
            answer(ERROR, format!("{}: {error}\n", command.get_program().display()).as_bytes())?;
            return answer(STATUS, b"127");
        }
    };
    let (mut stdout, mut stderr) = (child.stdout.take(), child.stderr.take());
    let reader = read_input(from, &mut child);
    thread::scope(|scope| {
        scope.spawn(|| stdout.as_mut().map(|stdout| forward(stdout, OUTPUT, answer)));
        scope.spawn(|| stderr.as_mut().map(|stderr| forward(stderr, ERROR, answer)));
    });
    let status = child.wait()?;
    let status = status.code().or_else(|| status.signal().map(|signal| 128 + signal)).unwrap_or_default();
    answer(STATUS, status.to_string().as_bytes())?;
    // The thread that reads the input must not signal the process group of an ended command.
    client.shutdown(Shutdown::Both)?;
    let _ = reader.join();
    Ok(())
}

/// Reads the command. Returns `None` if the client has sent none.
fn request(from: &mut TcpStream) -> io::Result<Option<Command>> {
    let (mut arguments, mut variables) = (Vec::new(), BTreeMap::new());
    loop {
        let (kind, content) = match receive(from) {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
            received => received?,
        };
        match kind {
            ARGUMENT => arguments.push(OsString::from_vec(content)),
            VARIABLE => {
                if let Some(end) = content.iter().position(|byte| *byte == b'=') {
                    let name = OsString::from_vec(content[..end].to_vec());
                    variables.insert(name, OsString::from_vec(content[end + 1..].to_vec()));
                }
            }
            START => break,
            other => return Err(io::Error::other(format!("unknown frame {other}"))),
        }
    }
    let [program, arguments @ ..] = arguments.as_slice() else { return Ok(None) };
    let mut command = Command::new(program);
    command.args(arguments).env_clear().envs(variables).current_dir("/").process_group(0);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    Ok(Some(command))
}

/// Starts a thread that passes the input on. If the client ends first, the thread kills the process group of the command.
fn read_input(mut from: TcpStream, child: &mut Child) -> thread::JoinHandle<()> {
    let (mut stdin, pid) = (child.stdin.take(), child.id());
    thread::spawn(move || {
        while let Ok((INPUT, content)) = receive(&mut from) {
            let written = stdin.as_mut().map(|stdin| stdin.write_all(&content));
            if content.is_empty() || !matches!(written, Some(Ok(()))) {
                stdin = None;
            }
        }
        let still_runs = Path::new("/proc").join(pid.to_string()).exists();
        if let (true, Ok(group)) = (still_runs, i32::try_from(pid)) {
            let _ = nix::sys::signal::killpg(nix::unistd::Pid::from_raw(group), nix::sys::signal::Signal::SIGKILL);
        }
    })
}
