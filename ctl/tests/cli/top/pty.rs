//! A pseudoterminal with gpushctl on it, and what a user sees there.

use std::{
    fs::File,
    io::{ErrorKind, Read as _, Write as _},
    num::NonZeroU16,
    os::fd::{AsFd as _, OwnedFd},
    process::{Child, ExitStatus, Stdio},
    sync::{Arc, Condvar, Mutex},
    time::Duration,
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use rustix::{
    pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt},
    termios::{LocalModes, Winsize, tcgetattr, tcsetwinsize},
};

use crate::support::Host;

/// Maximum wait for a picture.
const PATIENCE: Duration = Duration::from_secs(60);

/// What the program has drawn, with a notice at each change.
type Drawn = Arc<(Mutex<vt100::Parser>, Condvar)>;

/// A terminal on which gpushctl runs.
pub(super) struct Terminal {
    /// The side of the user.
    control: OwnedFd,
    /// The side of the program. As long as it is open, the modes can be read.
    program: File,
    drawn: Drawn,
    child: Child,
}

impl Terminal {
    /// Starts gpushctl on a terminal of this size.
    pub(super) fn start(host: &Host, args: &[&str], rows: u16, columns: u16) -> Self {
        let control = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
        grantpt(&control).unwrap();
        unlockpt(&control).unwrap();
        let name = ptsname(&control, Vec::new()).unwrap().into_string().unwrap();
        let program = File::options().read(true).write(true).open(name).unwrap();
        let drawn: Drawn = Arc::new((Mutex::new(vt100::Parser::new(cells(rows), cells(columns), 0)), Condvar::new()));
        set_size(&control, rows, columns);
        let part = || Stdio::from(program.try_clone().unwrap());
        let mut command = host.command(args);
        command.env("TERM", "xterm").env("TZ", "UTC").stdin(part()).stdout(part()).stderr(part());
        let child = command.spawn().unwrap();
        let (mut output, to) = (File::from(control.try_clone().unwrap()), Arc::clone(&drawn));
        std::thread::spawn(move || {
            let mut chunk = [0; 4096];
            loop {
                match output.read(&mut chunk) {
                    Ok(0) => return,
                    Ok(read) => {
                        to.0.lock().unwrap().process(&chunk[..read]);
                        to.1.notify_all();
                    }
                    Err(error) if error.kind() == ErrorKind::Interrupted => {}
                    Err(_) => return,
                }
            }
        });
        Self { control, program, drawn, child }
    }

    /// Waits until the picture satisfies a condition.
    pub(super) fn wait(&self, what: &str, is_drawn: impl Fn(&vt100::Screen) -> bool) {
        let (parser, changed) = &*self.drawn;
        let parser = parser.lock().unwrap();
        let (parser, waited) =
            changed.wait_timeout_while(parser, PATIENCE, |parser| !is_drawn(parser.screen())).unwrap();
        assert!(!waited.timed_out(), "{what} is not drawn:\n{}", parser.screen().contents());
    }

    pub(super) fn wait_for_text(&self, text: &str) {
        self.wait(text, |screen| screen.contents().contains(text));
    }

    pub(super) fn press(&self, keys: &str) {
        File::from(self.control.try_clone().unwrap()).write_all(keys.as_bytes()).unwrap();
    }

    /// Changes the size, and tells the program so.
    pub(super) fn resize(&self, rows: u16, columns: u16) {
        self.drawn.0.lock().unwrap().screen_mut().set_size(cells(rows), cells(columns));
        set_size(&self.control, rows, columns);
        self.signal(Signal::SIGWINCH);
    }

    pub(super) fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.child.id().try_into().unwrap()), signal).unwrap();
    }

    /// Returns whether the terminal passes each key to the program, without lines, echo and signals.
    pub(super) fn is_raw(&self) -> bool {
        let modes = tcgetattr(&self.program).unwrap().local_modes;
        !modes.intersects(LocalModes::ICANON | LocalModes::ECHO | LocalModes::ISIG)
    }

    /// Waits until the program has ended and the terminal is as before.
    pub(super) fn ended(mut self) -> ExitStatus {
        let status = self.child.wait().unwrap();
        self.wait("the end", |screen| !screen.alternate_screen() && !screen.hide_cursor());
        assert!(!self.is_raw(), "the terminal is still in raw mode");
        status
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        // A failed test leaves no program.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn cells(number: u16) -> NonZeroU16 {
    NonZeroU16::new(number).unwrap()
}

fn set_size(control: &OwnedFd, rows: u16, columns: u16) {
    let size = Winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
    tcsetwinsize(control.as_fd(), size).unwrap();
}
