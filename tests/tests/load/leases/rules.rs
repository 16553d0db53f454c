//! The config rules between which the tests change, and what they mean for a GPU.

use gpush_api::ComputeMode;

/// Layouts of GPUs with MIG. The first two layouts have the same instances, and differ only in the
/// MPS daemon of one device. Within a layout, all devices of a profile are shared in the same way.
const LAYOUTS: [&[&str]; 4] = [
    &["3g.40gb", "2g.20gb", "1g.10gb*2"],
    &["3g.40gb:mps", "2g.20gb", "1g.10gb*2"],
    &["2g.20gb*3", "1g.10gb"],
    &["2g.20gb*3:mps", "1g.10gb"],
];

/// The profiles of all layouts, and a profile that no layout has.
pub(super) const PROFILES: [&str; 4] = ["1g.10gb", "2g.20gb", "3g.40gb", "7g.80gb"];

/// A layout, by its position in [`LAYOUTS`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Layout(usize);

impl Layout {
    pub(super) const ALL: [Self; 4] = [Self(0), Self(1), Self(2), Self(3)];

    /// Two layouts with the same instances: without and with an MPS daemon on the device `3g.40gb`.
    pub(super) const PLAIN: Self = Self(0);
    pub(super) const SHARED: Self = Self(1);

    pub(super) fn entries(self) -> &'static [&'static str] {
        LAYOUTS[self.0]
    }

    /// Returns what a device of this profile offers. `None` if the layout has no such device.
    pub(super) fn offer(self, profile: &'static str) -> Option<Offer> {
        let entry = self.entries().iter().find(|entry| entry.starts_with(profile))?;
        Some(if entry.ends_with(":mps") { Offer::Mps } else { Offer::Mig(profile) })
    }
}

/// How a config rule shares a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Rule {
    /// Mode `exclusive`.
    Whole,
    /// Mode `timeslice` with several replicas.
    Timeslice,
    /// Mode `timeslice` with one replica, and with a compute mode that permits one process.
    OneProcess,
    /// Mode `mps`.
    Mps,
    /// Mode `mig`.
    Mig(Layout),
}

/// Number of replicas of [`Rule::Timeslice`].
const REPLICAS: usize = 3;

/// What a target offers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Offer {
    /// A MIG device of this profile.
    Mig(&'static str),
    /// Shares of the target, through MPS.
    Mps,
    /// This number of replicas.
    Timeslice(usize),
    /// The whole GPU.
    Whole,
}

impl Rule {
    /// The rules that do not use MIG. Every GPU can have them.
    pub(super) const WITHOUT_MIG: [Self; 4] = [Self::Whole, Self::Timeslice, Self::OneProcess, Self::Mps];

    /// Returns the rules that a GPU can have.
    pub(super) fn of_gpu(has_mig: bool) -> Vec<Self> {
        let layouts = Layout::ALL.into_iter().filter(|_| has_mig).map(Self::Mig);
        Self::WITHOUT_MIG.into_iter().chain(layouts).collect()
    }

    pub(super) fn layout(self) -> Option<Layout> {
        match self {
            Self::Mig(layout) => Some(layout),
            Self::Whole | Self::Timeslice | Self::OneProcess | Self::Mps => None,
        }
    }

    /// Returns what the whole GPU offers. `None` in mode `mig`.
    pub(super) fn offer(self) -> Option<Offer> {
        match self {
            Self::Whole => Some(Offer::Whole),
            Self::Timeslice => Some(Offer::Timeslice(REPLICAS)),
            Self::OneProcess => Some(Offer::Timeslice(1)),
            Self::Mps => Some(Offer::Mps),
            Self::Mig(_) => None,
        }
    }

    /// Returns the compute mode of a GPU with this rule.
    pub(super) fn compute_mode(self) -> ComputeMode {
        match self {
            Self::OneProcess | Self::Mps => ComputeMode::ExclusiveProcess,
            Self::Whole | Self::Timeslice | Self::Mig(_) => ComputeMode::Default,
        }
    }

    /// Returns whether a change from this rule to another changes only MIG devices, so that the other
    /// devices of the GPU stay as they are.
    pub(super) fn changes_devices_only(self, to: Self) -> bool {
        self.layout().is_some() && to.layout().is_some()
    }

    fn text(self) -> String {
        match self {
            Self::Whole => "mode = \"exclusive\"".to_owned(),
            Self::Timeslice => format!("mode = \"timeslice\"\ntimeslice = {{ replicas = {REPLICAS} }}"),
            Self::OneProcess => {
                "mode = \"timeslice\"\ntimeslice = { replicas = 1, compute_mode = \"exclusive_process\" }".to_owned()
            }
            Self::Mps => "mode = \"mps\"".to_owned(),
            Self::Mig(layout) => format!("mode = \"mig\"\nlayout = {:?}", layout.entries()),
        }
    }
}

/// Returns a config with one rule for each GPU.
pub(super) fn config(rules: &[Rule], auto_reconcile: bool) -> String {
    let rules = rules.iter().enumerate().map(|(gpu, rule)| format!("[[gpu]]\nmatch = [\"{gpu}\"]\n{}\n", rule.text()));
    let rules: String = rules.collect();
    format!("auto_reconcile = {auto_reconcile}\n{rules}")
}
