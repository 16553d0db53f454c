//! The terminal in raw mode. It is restored at every exit: the end of the program, an error, a panic and a signal.

use std::io;

use ratatui::{DefaultTerminal, Frame};

/// The terminal with the alternate screen and in raw mode. Dropping it restores the terminal.
#[derive(Debug)]
pub(super) struct Screen(DefaultTerminal);

impl Screen {
    /// Changes the terminal. A panic restores it before its message is printed.
    pub(super) fn open() -> io::Result<Self> {
        ratatui::try_init().map(Self).inspect_err(|_| {
            // The terminal may be half changed.
            let _ = ratatui::try_restore();
        })
    }

    pub(super) fn draw(&mut self, draw: impl FnOnce(&mut Frame<'_>)) -> io::Result<()> {
        self.0.draw(draw).map(drop)
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        // If the terminal no longer exists, there is nothing to restore.
        let _ = self.0.show_cursor();
        let _ = ratatui::try_restore();
    }
}

#[cfg(test)]
mod tests {
    use std::{
        fs::File,
        io::{ErrorKind, Read as _},
        num::NonZeroU16,
        process::{Command, Stdio},
    };

    use rustix::{
        pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt},
        termios::{LocalModes, Termios, tcgetattr},
    };

    use super::*;

    /// Set for the test that runs in the terminal of another test.
    const IN_TERMINAL: &str = "GPUSHCTL_TEST_IN_TERMINAL";

    /// `panic_restores_the_terminal_before_its_message` runs this test on a terminal. Otherwise, the test does nothing.
    #[test]
    fn panics_on_a_terminal() {
        if std::env::var_os(IN_TERMINAL).is_none() {
            return;
        }
        let mut screen = Screen::open().unwrap();
        screen.draw(|frame| frame.render_widget("picture", frame.area())).unwrap();
        panic!("the program has an error");
    }

    fn modes(termios: &Termios) -> LocalModes {
        termios.local_modes & (LocalModes::ICANON | LocalModes::ECHO | LocalModes::ISIG)
    }

    #[test]
    fn panic_restores_the_terminal_before_its_message() {
        let control = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
        grantpt(&control).unwrap();
        unlockpt(&control).unwrap();
        let name = ptsname(&control, Vec::new()).unwrap().into_string().unwrap();
        let terminal = File::options().read(true).write(true).open(name).unwrap();
        let before = tcgetattr(&terminal).unwrap();
        let part = || Stdio::from(terminal.try_clone().unwrap());
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "commands::top::terminal::tests::panics_on_a_terminal", "--nocapture"]);
        command.env(IN_TERMINAL, "1").env("TERM", "xterm").stdin(part()).stdout(part()).stderr(part());
        let mut child = command.spawn().unwrap();
        drop(command);
        let reader = std::thread::spawn(move || {
            let mut parser = vt100::Parser::new(NonZeroU16::new(24).unwrap(), NonZeroU16::new(80).unwrap(), 0);
            let (mut control, mut chunk) = (File::from(control), [0; 4096]);
            loop {
                match control.read(&mut chunk) {
                    Ok(0) => break,
                    Ok(read) => parser.process(&chunk[..read]),
                    Err(error) if error.kind() == ErrorKind::Interrupted => {}
                    // The last process has closed the terminal.
                    Err(_) => break,
                }
            }
            parser
        });
        assert!(!child.wait().unwrap().success());
        let after = tcgetattr(&terminal).unwrap();
        assert_eq!(modes(&after), modes(&before));
        drop(terminal);
        let parser = reader.join().unwrap();
        let screen = parser.screen();
        assert!(!screen.alternate_screen() && !screen.hide_cursor());
        let text = screen.contents();
        assert!(text.contains("the program has an error"), "{text}");
    }
}
