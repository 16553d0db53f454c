//! The flags of a lease request. A grammar in `gpush_core` parses their values, as it does for
//! requests of Slurm jobs.

use clap::{
    Args,
    builder::{PossibleValuesParser, TypedValueParser},
};
use gpush_api::{LeaseRequest, NoticeSignal};
use gpush_core::lease::request::{self, Key, RequestError, Spelling, Term};

/// A request for a lease.
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct RequestFlags {
    /// A MIG device of this profile
    #[arg(long, value_name = "PROFILE")]
    mig: Option<String>,
    /// MIG: minimum memory of the device. With --mps: maximum memory of each process
    #[arg(long, value_name = "MEMORY", allow_negative_numbers = true)]
    memory: Option<String>,
    /// MIG: minimum number of compute slices of the device
    #[arg(long, value_name = "NUMBER", allow_negative_numbers = true)]
    slices: Option<String>,
    /// A part of a GPU or MIG device through MPS: active thread percentage [default: set in the rule]
    #[arg(long, value_name = "PERCENT", num_args = 0..=1, allow_negative_numbers = true)]
    mps: Option<Option<String>>,
    /// With --mps: priority of kernels, normal or below-normal
    #[arg(long, value_name = "PRIORITY")]
    priority: Option<String>,
    /// A replica of a time-sliced GPU
    #[arg(long)]
    timeslice: bool,
    /// A whole GPU
    #[arg(long)]
    whole: bool,
    /// The request as text, as in Slurm: mps=25,memory=8G
    #[arg(long, value_name = "SPEC", conflicts_with_all = ["mig", "memory", "slices", "mps", "priority", "timeslice", "whole"])]
    request: Option<String>,
    /// GPUs that may be used: index, range 0-3, (start of) UUID, PCI address, model; repeatable
    #[arg(long = "gpu", short = 'g', short_alias = 'i', value_name = "GPU", value_delimiter = ',')]
    gpus: Vec<String>,
    /// Only this MPS target or MIG device, named as in `mps list` or `mig list -o name`
    #[arg(long, value_name = "TARGET", conflicts_with_all = ["gpus", "count"])]
    target: Option<String>,
    /// Number of MIG devices or GPUs; all of them are granted, or none [default: 1]
    #[arg(long, value_name = "NUMBER", allow_negative_numbers = true)]
    count: Option<String>,
    /// End the lease DURATION after the grant
    #[arg(long = "for", value_name = "DURATION", allow_negative_numbers = true)]
    duration: Option<String>,
    /// Wait for free capacity, at most DURATION [default without =DURATION: no limit]
    #[arg(long, value_name = "DURATION", num_args = 0..=1, require_equals = true)]
    wait: Option<Option<String>>,
    /// With each notice, send SIGNAL to processes of the lease that handle it: USR1, USR2, HUP, INT, TERM, URG, WINCH
    #[arg(long, value_name = "SIGNAL", value_parser = signal(), hide_possible_values = true)]
    notice_signal: Option<NoticeSignal>,
}

fn signal() -> impl TypedValueParser<Value = NoticeSignal> {
    let names = PossibleValuesParser::new(NoticeSignal::ALL.map(NoticeSignal::name));
    names.map(|name| name.parse().unwrap_or(NoticeSignal::Usr1))
}

impl RequestFlags {
    /// Returns whether the request waits for capacity.
    pub(crate) fn waits(&self) -> bool {
        self.wait.is_some()
    }

    /// Returns whether any of the flags is given.
    pub(crate) fn is_given(&self) -> bool {
        let is_other = self.request.is_some() || self.target.is_some() || self.notice_signal.is_some();
        !self.terms().is_empty() || is_other
    }

    /// Returns the request that the flags describe.
    ///
    /// # Errors
    /// If the value of a flag is wrong, or if flags contradict each other.
    pub(crate) fn request(&self) -> Result<LeaseRequest, RequestError> {
        let mut built = request::build(&self.terms(), Spelling::Flags)?;
        if let Some(spec) = &self.request {
            built.share = request::parse(spec)?.share;
            request::check(&built)?;
        }
        built.target.clone_from(&self.target);
        built.notice_signal = self.notice_signal;
        Ok(built)
    }

    fn terms(&self) -> Vec<Term<'_>> {
        let valued = [
            (Key::Mig, &self.mig),
            (Key::Memory, &self.memory),
            (Key::Slices, &self.slices),
            (Key::Priority, &self.priority),
            (Key::Count, &self.count),
            (Key::For, &self.duration),
        ];
        let optional = [(Key::Mps, &self.mps), (Key::Wait, &self.wait)];
        let bare = [(Key::Timeslice, self.timeslice), (Key::Whole, self.whole)];
        let valued = valued.into_iter().filter_map(|(key, value)| value.as_deref().map(|value| (key, Some(value))));
        let optional = optional.into_iter().filter_map(|(key, value)| value.as_ref().map(|v| (key, v.as_deref())));
        let bare = bare.into_iter().filter(|(_, is_given)| *is_given).map(|(key, _)| (key, None));
        let gpus = self.gpus.iter().map(|gpu| (Key::Gpu, Some(gpu.as_str())));
        valued.chain(optional).chain(bare).chain(gpus).map(|(key, value)| Term { key, value }).collect()
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use gpush_api::{LeaseShare, LeaseWait};

    use super::*;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        flags: RequestFlags,
        #[arg(last = true)]
        command: Vec<String>,
    }

    fn request(words: &[&str]) -> Result<LeaseRequest, String> {
        let line = Line::try_parse_from([&["x"], words].concat()).map_err(|error| error.to_string())?;
        line.flags.request().map_err(|error| error.to_string())
    }

    #[test]
    fn flags_become_a_request() {
        let whole =
            request(&["--whole", "--count", "2", "-g", "0-3,5", "-i", "7", "--for", "2h", "--wait=5m"]).unwrap();
        assert_eq!((&whole.share, whole.count, whole.duration_s), (&LeaseShare::Whole {}, 2, Some(7200)));
        assert_eq!((whole.gpus, whole.wait), (vec!["0-3".into(), "5".into(), "7".into()], LeaseWait::Seconds(300)));
        let mps = request(&["--mps", "--memory", "4G", "--wait", "--", "true"]).unwrap();
        assert_eq!((mps.share.kind().unwrap().name(), mps.wait), ("mps", LeaseWait::Unlimited));
        assert_eq!(request(&["--mps", "25"]).unwrap().share, request(&["--request", "mps=25"]).unwrap().share);
        assert_eq!(request(&["--request", "mig=1g.10gb", "--count", "2"]).unwrap().count, 2);
        assert_eq!(request(&["--target", "1:2g.20gb@2"]).unwrap().target.as_deref(), Some("1:2g.20gb@2"));
        assert_eq!(request(&["--notice-signal", "USR1"]).unwrap().notice_signal, Some(NoticeSignal::Usr1));
        assert_eq!(request(&[]).unwrap(), LeaseRequest::default());
    }

    #[test]
    fn wrong_flags_are_named() {
        for (words, part) in [
            (&["--mps", "101"][..], "`--mps`: `101` is not valid"),
            (&["--mps", "-5"], "`--mps`: `-5` is not valid"),
            (&["--mig", "big"], "`--mig`: `big` is not valid"),
            (&["--mig", "1g.10gb", "--memory", "10G"], "`--memory` does not apply to `--mig`"),
            (&["--whole", "--timeslice"], "exclude each other"),
            (&["--count", "0"], "the count 0 is not possible"),
            (&["--request", "mps=25", "--count", "2"], "a lease of kind mps has only one share, so it takes no count"),
            (&["--request", "mps=25", "--whole"], "cannot be used with"),
            (&["--request", "mps=25;id"], "is not valid"),
            (&["--for", "0"], "must be longer than 0"),
            (&["--notice-signal", "KILL"], "invalid value 'KILL'"),
        ] {
            let error = request(words).unwrap_err();
            assert!(error.contains(part), "{words:?}: {error}");
        }
    }
}
