//! The commands of the demo. For each preset: layouts with the profile names of its GPU models, and
//! the exit code that each command must have.

use anyhow::{Result, bail};
use gpush_geometry::PRESETS;

/// The layouts of one preset.
#[derive(Debug, Clone)]
pub(super) struct Tour {
    /// Description of the host in a few words.
    pub(super) about: &'static str,
    /// Two selectors: for the GPUs with the mixed layout, and for the GPUs with the even layout.
    pub(super) gpus: [&'static str; 2],
    /// Instances of different sizes on one GPU. A program uses the first instance.
    mixed: &'static [&'static str],
    /// Instances of nearly equal size.
    even: &'static [&'static str],
    /// Another layout. It has room for the instance in use.
    pub(super) reshaped: &'static [&'static str],
    /// The whole GPU as one instance. This layout has no room for the instance in use.
    pub(super) whole: &'static str,
    /// Profile of the instance in use.
    pub(super) used: &'static str,
    /// Index of a GPU with the even layout. At the end of the tour, this GPU is shared through MPS.
    pub(super) shared: u32,
}

const SEVEN_80: Layouts = Layouts {
    mixed: &["3g.40gb", "2g.20gb", "1g.10gb*2"],
    even: &["2g.20gb*3", "1g.10gb"],
    reshaped: &["3g.40gb", "1g.10gb*4"],
    whole: "7g.80gb",
};
const SEVEN_141: Layouts = Layouts {
    mixed: &["3g.71gb", "2g.35gb", "1g.18gb*2"],
    even: &["2g.35gb*3", "1g.18gb"],
    reshaped: &["3g.71gb", "1g.18gb*4"],
    whole: "7g.141gb",
};
const SEVEN_180: Layouts = Layouts {
    mixed: &["3g.90gb", "2g.45gb", "1g.23gb*2"],
    even: &["2g.45gb*3", "1g.23gb"],
    reshaped: &["3g.90gb", "1g.23gb*4"],
    whole: "7g.180gb",
};
const FOUR_24: Layouts =
    Layouts { mixed: &["2g.12gb", "1g.6gb*2"], even: &["1g.6gb*4"], reshaped: &["2g.12gb*2"], whole: "4g.24gb" };
const FOUR_96: Layouts =
    Layouts { mixed: &["2g.48gb", "1g.24gb*2"], even: &["1g.24gb*4"], reshaped: &["2g.48gb*2"], whole: "4g.96gb" };

/// The MPS settings at the end of the tour.
pub(super) const MPS: &str = "mode = \"mps\"\nmps = { percentage = 50, total_percentage = 100 }";

/// Layouts with the profile names of one GPU model.
struct Layouts {
    mixed: &'static [&'static str],
    even: &'static [&'static str],
    reshaped: &'static [&'static str],
    whole: &'static str,
}

impl Tour {
    /// Returns the tour of a preset.
    pub(super) fn of(preset: &str) -> Result<Self> {
        let Some(known) = PRESETS.iter().find(|known| known.name == preset) else {
            let names: Vec<&str> = PRESETS.iter().map(|known| known.name).collect();
            bail!("there is no preset `{preset}`; there are {}", names.join(", "));
        };
        let (gpus, shared, layouts) = match preset {
            "dgx-h200" => (["0-3", "4-7"], 4, SEVEN_141),
            "dgx-b200" => (["0-3", "4-7"], 4, SEVEN_180),
            "a30x4" => (["0-1", "2-3"], 2, FOUR_24),
            "rtx-pro-6000x2" => (["0", "1"], 1, FOUR_96),
            "mixed" => (["*A100*", "*H100*"], 2, SEVEN_80),
            _ => (["0-3", "4-7"], 4, SEVEN_80),
        };
        let Layouts { mixed, even, reshaped, whole } = layouts;
        Ok(Self { about: known.about, gpus, mixed, even, reshaped, whole, used: mixed[0], shared })
    }

    /// Returns the config of the agent, with two rules and two named layouts.
    pub(super) fn config(&self) -> String {
        self.config_with("mode = \"mig\"\nlayout = \"even\"")
    }

    /// Returns the config in which the GPUs of the second rule are shared through MPS.
    pub(super) fn config_with_mps(&self) -> String {
        self.config_with(MPS)
    }

    fn config_with(&self, second: &str) -> String {
        let list = |layout: &[&str]| layout.iter().map(|entry| format!("{entry:?}")).collect::<Vec<_>>().join(", ");
        format!(
            "[layouts]\nmixed = [{}]\neven = [{}]\n\n\
             [[gpu]]\nname = \"research\"\nmatch = [\"{}\"]\nmode = \"mig\"\nlayout = \"mixed\"\n\n\
             [[gpu]]\nname = \"teaching\"\nmatch = [\"{}\"]\n{second}\n",
            list(self.mixed),
            list(self.even),
            self.gpus[0],
            self.gpus[1],
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_preset_has_a_tour_with_its_profiles() {
        for preset in PRESETS {
            let tour = Tour::of(preset.name).unwrap();
            let model = gpush_geometry::model(preset.gpus[0].0).unwrap();
            let names: Vec<&str> = model.gi_profiles.iter().map(|profile| profile.name.as_str()).collect();
            for entry in tour.mixed.iter().chain(tour.even).chain(tour.reshaped).chain([&tour.whole]) {
                let profile = entry.split('*').next().unwrap();
                assert!(names.contains(&profile), "{}: {profile} is none of {names:?}", preset.name);
            }
        }
        assert!(Tour::of("dgx-a200").unwrap_err().to_string().contains("dgx-a100"));
    }
}
