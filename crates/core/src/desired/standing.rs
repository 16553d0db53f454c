//! What carrying out a request makes of a GPU's override.
//!
//! | layout of the request | on a GPU that a rule gives to mode `mig` |
//! |---|---|
//! | explicit | makes one; the rule's own layout, written out, ends one |
//! | the config's, GPU named | ends one |
//! | the config's, GPU not named | leaves it: it is what is wanted |
//! | what is wanted | leaves it |
//!
//! On any other GPU there is no rule's layout to stand above.

use std::collections::BTreeMap;

use gpush_api::{Gpu, GpuPlan, LayoutSource, Mode, PlanRequest};

use super::wishes;
use crate::{
    config::Config,
    layout::{Entry, Layout},
    selector::Selector,
};

/// What becomes of the override of one GPU once the request is carried out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Standing {
    /// It stays as it is, or there is none.
    Stays,
    /// One is made, in place of another if there is one.
    Made {
        /// Rule that claims the GPU.
        rule: Option<String>,
        /// Layout in canonical text.
        layout: Vec<String>,
    },
    /// It ends, if there is one.
    Ended,
}

/// For each plan that was made of `request`, what becomes of its GPU's override.
#[must_use]
pub fn standing(config: &Config, gpus: &[Gpu], request: &PlanRequest, plans: &[GpuPlan]) -> Vec<Standing> {
    let wishes = wishes(config, gpus);
    let of = |plan: &GpuPlan| {
        let Some(at) = gpus.iter().position(|gpu| gpu.uuid == plan.uuid) else { return Standing::Stays };
        let wish = &wishes[at];
        if wish.mode != Mode::Mig || !wish.has_rule_layout() {
            return Standing::Stays;
        }
        let is_own = |layout: &[String]| wish.configured.as_ref().is_some_and(|own| same(own, layout));
        match &request.layout {
            LayoutSource::Wanted => Standing::Stays,
            LayoutSource::Config if request.gpus.is_empty() => Standing::Stays,
            LayoutSource::Config => Standing::Ended,
            LayoutSource::PerGpu(each)
                if each.iter().any(|one| {
                    !one.mig && Selector::resolve(std::slice::from_ref(&one.gpu), gpus).is_ok_and(|is| is == [at])
                }) =>
            {
                Standing::Stays
            }
            LayoutSource::Named(_) | LayoutSource::Entries(_) | LayoutSource::PerGpu(_) if is_own(&plan.layout) => {
                Standing::Ended
            }
            LayoutSource::Named(_) | LayoutSource::Entries(_) | LayoutSource::PerGpu(_) => {
                Standing::Made { rule: wish.rule.clone(), layout: plan.layout.clone() }
            }
        }
    };
    plans.iter().map(of).collect()
}

/// Whether both are the same layout: the order of entries matters only to people, and so does
/// whether two are written as one with its count.
fn same(layout: &Layout, canonical: &[String]) -> bool {
    Layout::parse_list(canonical).is_ok_and(|other| counted(layout) == counted(&other))
}

/// How many of each entry.
fn counted(layout: &Layout) -> BTreeMap<String, u32> {
    let mut counts = BTreeMap::new();
    for entry in &layout.entries {
        let one = Entry { count: 1, ..entry.clone() };
        *counts.entry(one.to_string()).or_default() += u32::from(entry.count);
    }
    counts
}
