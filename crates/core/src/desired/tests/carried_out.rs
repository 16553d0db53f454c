//! Executes plans for any layout on any GPU.

use super::*;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// A GPU has drift if and only if its plan has steps. After all steps, the GPU has no drift.
    #[test]
    fn drift_and_plan_agree(before in any_layout(), after in any_layout()) {
        let mut gpu = host().remove(7);
        for text in [before, after] {
            let layout = Layout::parse(&text).unwrap();
            let plan = one(&Config::default(), &[gpu.clone()], &PlanRequest {
                gpus: vec!["all".to_owned()],
                layout: LayoutSource::Entries(layout.canonical()),
            });
            let desired_state = DesiredState { mode: Mode::Mig, rule: None, layout: Some(layout), configured: None, dynamic_rule: false, dynamic: false, timeslice: None };
            if plan.refusal.is_some() {
                prop_assert!(!drift(&desired_state, &gpu).is_empty(), "{text}");
                continue;
            }
            prop_assert_eq!(plan.steps.is_empty(), drift(&desired_state, &gpu).is_empty(), "{}: {:?}", text, drift(&desired_state, &gpu));
            carry_out(&mut gpu, &plan);
            prop_assert_eq!(drift(&desired_state, &gpu), Vec::<String>::new(), "{}", text);
        }
    }
}

#[test]
fn fixtures_use_placements_that_the_gpu_model_has() {
    // Checks the test data itself: a state that no driver can report would prove nothing.
    let mut gpu = host().remove(0);
    set(&mut gpu, &[("3g.40gb", 4, &[])]);
    assert_eq!(gpu.mig.unwrap().instances[0].placement, Placement { start: 4, size: 4 });
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    /// A damaged saved host is refused, or gets plans. A damaged saved host never causes a panic.
    #[test]
    fn damaged_saved_hosts_never_panic(figures in prop::collection::vec((0usize..600, 0u32..300), 1..4), which in 0usize..6) {
        let names = ["1g.10gb", "3g.40gb", "1c.3g.40gb*3", "7g.80gb", "none", "1g.10gb@4,2g.20gb"];
        let mut one = host().remove(0);
        set(&mut one, &[("3g.40gb", 4, &["1c.3g.40gb", "1c.3g.40gb"]), ("1g.10gb", 0, &[])]);
        let mut value = serde_json::to_value(&one).unwrap();
        for (at, figure) in figures {
            let mut left = at;
            replace_figure(&mut value, &mut left, figure);
        }
        let text = serde_json::to_vec(&value).unwrap();
        if let Ok(gpus) = preset::saved(&text, "host.json") {
            let layout = LayoutSource::Entries(vec![names[which].to_owned()]);
            let _ = plan_host(&Config::default(), &gpus, &request(&["all"], layout));
            let layout = Layout::parse(names[which]).ok();
            let desired_state = DesiredState { mode: Mode::Mig, rule: None, layout, configured: None, dynamic_rule: false, dynamic: false, timeslice: None };
            for gpu in &gpus {
                let _ = drift(&desired_state, gpu);
            }
        }
    }
}

/// Replaces one number of a document.
fn replace_figure(value: &mut serde_json::Value, left: &mut usize, figure: u32) {
    match value {
        serde_json::Value::Number(_) => {
            if *left == 0 {
                *value = figure.into();
            }
            *left = left.wrapping_sub(1);
        }
        serde_json::Value::Array(items) => items.iter_mut().for_each(|item| replace_figure(item, left, figure)),
        serde_json::Value::Object(fields) => fields.values_mut().for_each(|field| replace_figure(field, left, figure)),
        serde_json::Value::Null | serde_json::Value::Bool(_) | serde_json::Value::String(_) => {}
    }
}
