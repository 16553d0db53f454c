//! Plans: the steps that lead to a layout, what they disturb, and what blocks them.

use std::fmt;

use jiff::Timestamp;
use serde::{
    Deserialize, Deserializer, Serialize,
    de::{
        self, IntoDeserializer, MapAccess, Visitor,
        value::{MapAccessDeserializer, StrDeserializer},
    },
};

use crate::{
    ids::{GpuIndex, GpuUuid, TargetUuid},
    mode::Mode,
    refusal::Refusal,
    step::{InstanceStep, MigModeStep, MpsStep, Phase, Reset, Step, TimesliceStep},
};

/// Source of the desired layout.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum LayoutSource {
    /// The layout of each GPU's config rule. If the request names a GPU that has an override, the override ends. Other
    /// GPUs keep their overrides.
    #[default]
    Config,
    /// The desired layout of each GPU: the layout of the active override, or of the config rule if
    /// there is no override.
    Wanted,
    /// A layout of the config, by its name.
    Named(String),
    /// Entries such as `3g.40gb`, `1g.10gb*2`, `1g.10gb@4`, `1c.3g.40gb`, `2g.20gb:mps`.
    Entries(Vec<String>),
    /// A separate layout for each GPU, in one operation. `selectors` of the request must be empty.
    PerGpu(Vec<GpuLayout>),
}

/// Reads a layout source. If the value does not have an accepted form, the error lists all accepted forms. The error of
/// serde's derived code would not list them.
fn layout_source<'de, D: Deserializer<'de>>(from: D) -> Result<LayoutSource, D::Error> {
    struct Forms;

    impl<'de> Visitor<'de> for Forms {
        type Value = LayoutSource;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str(
                "\"config\", \"wanted\", {\"named\": NAME}, {\"entries\": [\"3g.40gb\", …]} or {\"per_gpu\": […]}",
            )
        }

        fn visit_str<E: de::Error>(self, word: &str) -> Result<LayoutSource, E> {
            let word: StrDeserializer<'_, E> = word.into_deserializer();
            LayoutSource::deserialize(word)
        }

        fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<LayoutSource, A::Error> {
            LayoutSource::deserialize(MapAccessDeserializer::new(map))
        }
    }

    from.deserialize_any(Forms)
}

/// The layout for one GPU, independent of the config.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct GpuLayout {
    /// Selector of one GPU. Prefer a UUID, because indexes can change.
    #[serde(rename = "selector")]
    pub gpu: String,
    /// Whether to enable MIG mode. If false, `layout` must be empty.
    #[serde(rename = "mig_enabled")]
    pub mig: bool,
    /// Entries, as in [`LayoutSource::Entries`]; empty for MIG mode without instances.
    #[serde(default)]
    pub layout: Vec<String>,
}

/// Body of `POST /v1/mig/plan`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct PlanRequest {
    /// Selectors of GPUs: index, UUID, PCI address, or model with wildcards. Empty for all GPUs
    /// that the config claims for MIG.
    #[serde(default, rename = "selectors")]
    pub gpus: Vec<String>,
    /// Source of the desired layout.
    #[serde(default, rename = "layout_source", deserialize_with = "layout_source")]
    pub layout: LayoutSource,
}

/// Body of `POST /v1/mig/apply`. gpushd plans all GPUs first, and changes nothing if one plan is refused.
///
/// If the request has an explicit layout and a `mig` rule claims the GPU, gpushd makes an override
/// after it has applied the layout. The override is the desired layout of the GPU until it is
/// cleared or expires. Applying the rule's own layout ends the override.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ApplyRequest {
    /// Selectors of GPUs, as in [`PlanRequest`].
    #[serde(default, rename = "selectors")]
    pub gpus: Vec<String>,
    /// Source of the desired layout.
    #[serde(default, rename = "layout_source", deserialize_with = "layout_source")]
    pub layout: LayoutSource,
    /// Reason, shown to all users.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Maximum seconds that the operation may be queued, at most 2592000 (30 days). The operation
    /// waits for other operations on its GPUs, and until instances that block it are idle. If
    /// absent, gpushd refuses a request that would have to wait.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wait_s: Option<u64>,
    /// Whether to apply the layout without making or ending an override. gpushd then reports the
    /// difference from the desired layout as drift.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub once: bool,
    /// Time at which the override expires; absent if it does not expire.
    #[serde(default, with = "crate::timestamp::optional", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>, format = DateTime))]
    pub expires_at: Option<Timestamp>,
}

/// The plan of one GPU.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct GpuPlan {
    /// Index of the GPU.
    #[cfg_attr(feature = "openapi", schema(value_type = u32))]
    pub gpu: GpuIndex,
    /// UUID of the GPU.
    #[cfg_attr(feature = "openapi", schema(value_type = String))]
    pub gpu_uuid: GpuUuid,
    /// Product name.
    pub name: String,
    /// Mode after the plan, if the rule of the GPU needs the whole GPU: `mps`, `timeslice` or `exclusive`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<Mode>,
    /// Layout after the plan, in canonical text.
    pub layout: Vec<String>,
    /// Steps in the order of execution; empty if nothing has to change.
    pub steps: Vec<Step>,
    /// Services of the config. gpushd stops the running ones before the steps, and starts them after the operation,
    /// because the driver refuses the steps while a program has the GPU open.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub services: Vec<String>,
    /// Hooks of the config that run before and after the steps, for the same reason.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub hooks: Vec<String>,
    /// Ids of the GPU instances that the plan does not change.
    pub keeps: Vec<u32>,
    /// Why no plan is possible. If present, `steps` is empty.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refusal: Option<Refusal>,
    /// The refusal as an error with a hint.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<crate::ApiError>,
}

impl GpuPlan {
    /// Returns whether the plan has no steps.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.steps.is_empty()
    }

    /// Adds a step at the end of its phase.
    pub fn add(&mut self, step: Step) {
        let at = self.steps.partition_point(|earlier| earlier.phase() <= step.phase());
        self.steps.insert(at, step);
    }

    /// Returns the steps of one phase, in order.
    pub fn phase(&self, phase: Phase) -> impl Iterator<Item = &Step> {
        self.steps.iter().filter(move |step| step.phase() == phase)
    }

    /// Returns the steps that create and destroy MIG instances, in order.
    pub fn instance_steps(&self) -> impl Iterator<Item = &InstanceStep> {
        self.steps.iter().filter_map(|step| if let Step::Instance(step) = step { Some(step) } else { None })
    }

    /// Returns the UUIDs of the MIG devices that the plan destroys.
    pub fn destroyed_devices(&self) -> impl Iterator<Item = &TargetUuid> {
        self.instance_steps().filter_map(|step| match step {
            InstanceStep::DestroyCompute { uuid, .. } => uuid.as_ref(),
            InstanceStep::DestroyGpuInstance { .. }
            | InstanceStep::CreateGpuInstance { .. }
            | InstanceStep::CreateCompute { .. } => None,
        })
    }

    /// Returns the step that changes MIG mode.
    #[must_use]
    pub fn mig_mode_step(&self) -> Option<&MigModeStep> {
        self.steps.iter().find_map(|step| if let Step::MigMode(step) = step { Some(step) } else { None })
    }

    /// Returns the MIG mode that the plan sets; `None` if the plan does not change it.
    #[must_use]
    pub fn mig_mode(&self) -> Option<bool> {
        self.mig_mode_step().map(MigModeStep::enables)
    }

    /// Returns the reset that the plan needs.
    #[must_use]
    pub fn reset(&self) -> Option<&Reset> {
        self.mig_mode_step().and_then(MigModeStep::reset)
    }

    /// Returns whether the plan sets a MIG mode that is effective only after a reboot of the host. Such a plan has no
    /// steps after the mode.
    #[must_use]
    pub fn waits_for_reboot(&self) -> bool {
        self.mig_mode_step().is_some_and(MigModeStep::at_reboot)
    }

    /// Returns the reset that the plan needs, so that the caller can complete it.
    pub fn reset_mut(&mut self) -> Option<&mut Reset> {
        self.steps.iter_mut().find_map(|step| match step {
            Step::MigMode(step) => step.reset_mut(),
            Step::Mps(_) | Step::Instance(_) | Step::Timeslice(_) => None,
        })
    }

    /// Returns the MIG devices whose MPS daemons the plan starts; `None` for the daemon of the whole GPU.
    pub fn started_daemons(&self) -> impl Iterator<Item = Option<&str>> {
        self.steps.iter().filter_map(|step| match step {
            Step::Mps(MpsStep::StartDaemon { device }) => Some(device.as_deref()),
            Step::Mps(MpsStep::StopDaemon { .. }) | Step::MigMode(_) | Step::Instance(_) | Step::Timeslice(_) => None,
        })
    }

    /// Returns the UUIDs of the targets whose MPS daemons the plan stops.
    pub fn stopped_daemons(&self) -> impl Iterator<Item = &TargetUuid> {
        self.steps.iter().filter_map(|step| match step {
            Step::Mps(MpsStep::StopDaemon { uuid, .. }) => Some(uuid),
            Step::Mps(MpsStep::StartDaemon { .. }) | Step::MigMode(_) | Step::Instance(_) | Step::Timeslice(_) => None,
        })
    }

    /// Returns whether the plan starts the MPS daemon of the whole GPU.
    #[must_use]
    pub fn starts_mps(&self) -> bool {
        self.steps.contains(&Step::Mps(MpsStep::StartDaemon { device: None }))
    }

    /// Returns whether the plan sets the time-slice level of the whole GPU.
    #[must_use]
    pub fn sets_timeslice(&self) -> bool {
        self.steps.contains(&Step::Timeslice(TimesliceStep::Set))
    }

    /// Describes the state after the plan: a layout, or how the whole GPU is shared.
    #[must_use]
    pub fn end_state(&self) -> String {
        if self.starts_mps() {
            "whole GPU, shared through MPS".to_owned()
        } else if self.sets_timeslice() {
            "whole GPU, time-sliced".to_owned()
        } else if self.mig_mode() == Some(false) {
            "whole GPU, MIG mode off".to_owned()
        } else if !self.changes_mig() && self.stopped_daemons().any(|uuid| *uuid == self.gpu_uuid) {
            "whole GPU, not shared through MPS".to_owned()
        } else {
            match self.mode {
                Some(Mode::Mps) => "whole GPU, shared through MPS".to_owned(),
                Some(Mode::Timeslice) => "whole GPU, time-sliced".to_owned(),
                Some(Mode::Exclusive) => "whole GPU".to_owned(),
                Some(Mode::Mig | Mode::NoRule | Mode::Unmanaged) | None => self.layout.join(", "),
            }
        }
    }

    /// Returns whether the plan changes MIG mode or MIG instances.
    #[must_use]
    pub fn changes_mig(&self) -> bool {
        self.steps.iter().any(Step::changes_mig)
    }

    /// Returns whether MIG mode is off after the plan. `gpu` is the state before the plan.
    #[must_use]
    pub fn leaves_whole(&self, gpu: &crate::Gpu) -> bool {
        match self.mig_mode() {
            Some(enabled) => !enabled && !self.waits_for_reboot(),
            None => gpu.mig.as_ref().is_none_or(|mig| !mig.enabled),
        }
    }

    /// Returns the number of steps.
    #[must_use]
    pub fn total(&self) -> u32 {
        u32::try_from(self.steps.len()).unwrap_or(u32::MAX)
    }

    /// Returns a copy of the plan without steps and without a refusal.
    #[must_use]
    pub fn without_steps(&self) -> Self {
        let Self { gpu, gpu_uuid, name, layout, .. } = self.clone();
        Self { gpu, gpu_uuid, name, layout, ..Self::default() }
    }

    /// Returns the plan with this error.
    #[must_use]
    pub fn refused(self, error: crate::ApiError) -> Self {
        Self { error: Some(error), ..self }
    }
}

/// Answer of `POST /v1/mig/plan`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Plans {
    /// Plans, one for each GPU, in the order of the GPU indexes.
    pub plans: Vec<GpuPlan>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_form_of_a_layout_is_read_and_another_error_lists_them() {
        let read = |layout: &str| {
            serde_json::from_str::<PlanRequest>(&format!("{{\"layout_source\": {layout}}}"))
                .map(|request| request.layout)
        };
        assert_eq!(read("\"wanted\"").unwrap(), LayoutSource::Wanted);
        assert_eq!(read("{\"named\": \"mixed\"}").unwrap(), LayoutSource::Named("mixed".to_owned()));
        assert_eq!(read("{\"entries\": []}").unwrap(), LayoutSource::Entries(Vec::new()));
        let per_gpu = read("{\"per_gpu\": [{\"selector\": \"0\", \"mig_enabled\": false}]}").unwrap();
        assert!(matches!(per_gpu, LayoutSource::PerGpu(gpus) if gpus.len() == 1));
        assert_eq!(serde_json::from_str::<ApplyRequest>("{}").unwrap().layout, LayoutSource::Config);
        for wrong in ["[\"1g.10gb\"]", "7", "null"] {
            let error = read(wrong).unwrap_err().to_string();
            assert!(error.contains("expected \"config\"") && error.contains("\"entries\": ["), "{error}");
        }
        assert!(read("{\"entries\": 7}").is_err() && read("\"mixed\"").is_err() && read("{}").is_err());
        assert!(read("{\"named\": \"a\", \"entries\": []}").is_err(), "two at once");
    }
}
