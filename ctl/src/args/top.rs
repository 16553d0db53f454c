//! `gpushctl top`.

use std::time::Duration;

use clap::Args;

use super::{Gpus, values::duration};

/// Text after the options: notes and examples.
pub(super) const NOTES: &str = "\
`h` shows the keys. A figure that is not known is -, never 0. While a top is
open, gpushd samples the GPUs once a second, also for ten open tops.

Examples:
  gpushctl top
  gpushctl top 0-3 --interval 5s
  gpushctl top --once --json";

/// Minimum pause between two pictures. gpushd samples the GPUs once a second.
const SHORTEST: Duration = Duration::from_secs(1);

/// `gpushctl top`.
#[derive(Debug, Args)]
pub(crate) struct TopArgs {
    #[command(flatten)]
    pub(crate) which: Gpus,
    /// Print one picture and exit; the default if stdout is not a terminal
    #[arg(long)]
    pub(crate) once: bool,
    /// Pause between two pictures, at least 1s
    #[arg(long, value_name = "DURATION", default_value = "2s", value_parser = interval, allow_negative_numbers = true,
          conflicts_with = "once")]
    pub(crate) interval: Duration,
}

fn interval(text: &str) -> Result<Duration, String> {
    let interval = duration(text)?;
    if interval < SHORTEST {
        return Err("the interval must be 1s or longer: gpushd samples the GPUs once a second".to_owned());
    }
    Ok(interval)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interval_below_a_second_is_refused() {
        assert_eq!(interval("1s"), Ok(Duration::from_secs(1)));
        assert_eq!(interval("1500ms").ok(), duration("1500ms").ok());
        for wrong in ["0.5", "0", "-1", "x"] {
            assert!(interval(wrong).is_err(), "{wrong}");
        }
    }
}
