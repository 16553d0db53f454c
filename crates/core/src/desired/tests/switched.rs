//! GPUs on NVSwitches, which are reset together.

use gpush_api::{GpuIndex, NvLink};

use super::*;

#[test]
fn gpus_on_a_switch_reset_together_without_fabric_manager() {
    let mut gpus = preset::gpus("dgx-a100").unwrap();
    for gpu in &mut gpus {
        let mig = gpu.mig.as_mut().unwrap();
        mig.set_mode(false, false);
        gpu.nvlink = Some(NvLink { links: 12, switched: gpu.index < GpuIndex(4), peers: Vec::new() });
    }
    let none = Config::default();
    let plan = |config: &Config, gpus: &[Gpu]| {
        plan_host(config, gpus, &request(&["0"], entries("7g.80gb"))).unwrap().plans.remove(0)
    };
    let together = |plan: &GpuPlan| plan.reset().unwrap().together.iter().map(|peer| peer.gpu).collect::<Vec<_>>();
    assert_eq!(together(&plan(&none, &gpus)), [] as [u32; 0], "where there are switches, it is taken to run");
    let mut alone = [plan(&none, &gpus)];
    without_fabric_manager(&none, &gpus, &mut alone);
    assert_eq!(together(&alone[0]), [1, 2, 3], "GPU 4 and up hang on none");
    let stops = "[mode_change]\nservices = [\"nvidia-fabricmanager.service\"]\n";
    assert_eq!(together(&plan(&Config::parse(stops, "test").unwrap(), &gpus)), [1, 2, 3], "stopped for the reset");
    // MIG mode must be turned off last. Otherwise the reset would destroy the new instances on
    // other GPUs.
    let mig = gpus[0].mig.as_mut().unwrap();
    mig.set_mode(true, true);
    let each = |gpu: &Gpu, mig| GpuLayout {
        gpu: gpu.uuid.to_string(),
        mig,
        layout: if mig { vec!["7g.80gb".to_owned()] } else { Vec::new() },
    };
    let swap = LayoutSource::PerGpu(vec![each(&gpus[0], false), each(&gpus[1], true)]);
    let mut swapped = plan_host(&none, &gpus, &request(&[], swap)).unwrap().plans;
    assert!(swapped.iter().all(|plan| plan.error.is_none()), "by themselves they can: {swapped:?}");
    without_fabric_manager(&none, &gpus, &mut swapped);
    let error = swapped[0].error.as_ref().unwrap();
    assert!(error.causes[0].contains("GPU 1") && error.causes[0].contains("same operation"), "{error:?}");
    let mig = gpus[0].mig.as_mut().unwrap();
    mig.set_mode(false, false);
    // This reset must not apply a pending mode change of another GPU.
    gpus[1].mig.as_mut().unwrap().reset_pending = true;
    let mut along = [plan(&none, &gpus)];
    without_fabric_manager(&none, &gpus, &mut along);
    assert!(along[0].error.as_ref().unwrap().causes[0].contains("pending MIG mode (on)"), "{along:?}");
    gpus[1].mig.as_mut().unwrap().reset_pending = false;
    gpus[2].processes.push(process(4711));
    without_fabric_manager(&none, &gpus, &mut alone);
    let error = alone[0].error.as_ref().unwrap();
    assert!(error.causes[0].contains("GPU 2"), "{error:?}");
    assert!(error.hint.as_deref().unwrap().contains("systemctl start nvidia-fabricmanager"), "{error:?}");
    // GPUs that are connected directly are reset separately.
    gpus[0].nvlink = Some(NvLink { links: 4, switched: false, peers: vec![gpus[2].pci.clone()] });
    alone = [plan(&none, &gpus)];
    without_fabric_manager(&none, &gpus, &mut alone);
    assert_eq!(together(&alone[0]), [] as [u32; 0]);
}
