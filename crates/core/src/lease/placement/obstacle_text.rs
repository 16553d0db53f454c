//! Why GPUs that could meet a request do not do so now, in words.

use gpush_api::{GpuIndex, LeaseKind};

use super::{Closed, GpuOffer, Host, MpsOffer, Obstacle, PlacementPolicy, PlacementRequest, RequestedShare, gang};

/// Returns the number of leases on an MPS GPU if the GPU has room for the share, but `max_clients` allows no further
/// lease on any of its targets.
fn leases_at_limit(gpu: GpuIndex, wanted: &PlacementRequest, host: &Host) -> Option<u32> {
    let RequestedShare::Mps { .. } = wanted.share else { return None };
    let offer = host.gpus.iter().find(|offer| offer.index == gpu)?;
    let targets: Vec<&MpsOffer> = offer.mps.iter().filter(|mps| wanted.has_target(&mps.target)).collect();
    // A target whose daemon does not serve has the largest number.
    let is_at_limit = |mps: &&MpsOffer| mps.leases >= mps.most_leases && mps.leases < u32::MAX;
    let without_limit = |mps: &MpsOffer| MpsOffer { most_leases: u32::MAX, ..mps.clone() };
    let unlimited = GpuOffer { mps: offer.mps.iter().map(without_limit).collect(), ..offer.clone() };
    let has_room = gang::capacity(&unlimited, wanted, PlacementPolicy::Pack) > 0;
    let leases = targets.iter().map(|mps| mps.leases).fold(0, u32::saturating_add);
    (!targets.is_empty() && has_room && targets.iter().all(is_at_limit)).then_some(leases)
}

/// Returns whether a GPU could fulfil the request if the queue had reserved nothing.
fn is_reserved(gpu: GpuIndex, wanted: &PlacementRequest, host: &Host) -> bool {
    let offer = host.gpus.iter().find(|offer| offer.index == gpu && offer.closed.is_none());
    offer.is_some_and(|offer| gang::capacity(offer, wanted, PlacementPolicy::Pack) >= wanted.count)
}

/// Says why GPUs that could meet a request do not do so now.
pub(super) fn busy(obstacles: &[(GpuIndex, Obstacle)], wanted: &PlacementRequest, host: &Host) -> String {
    let verb = |one: &str, several: &str| verb_for(obstacles, one, several);
    let all = |closed: Closed| obstacles.iter().all(|(_, obstacle)| *obstacle == Obstacle::Closed(closed));
    if all(Closed::Cordoned) {
        verb("is cordoned", "are cordoned")
    } else if all(Closed::Claimed) {
        format!("an operation is changing {}", gpus_of(obstacles))
    } else if all(Closed::Prohibited) {
        verb("does not accept programs", "do not accept programs")
    } else if all(Closed::NotReady) {
        verb("is not ready", "are not ready")
    } else if all(Closed::Pending) {
        verb("still follows an earlier rule", "still follow earlier rules")
    } else if all(Closed::StillShared) {
        verb("is still shared through MPS", "are still shared through MPS")
    } else if all(Closed::NotShared) {
        verb("is not shared through MPS yet", "are not shared through MPS yet")
    } else if obstacles.iter().all(|(_, obstacle)| matches!(obstacle, Obstacle::Closed(_))) {
        "the GPUs accept no leases now".to_owned()
    } else if obstacles.iter().all(|(gpu, _)| leases_at_limit(*gpu, wanted, host).is_some()) {
        "the number of leases has reached its limit".to_owned()
    } else if obstacles.iter().all(|(gpu, _)| is_reserved(*gpu, wanted, host)) {
        "the free capacity is reserved for earlier requests".to_owned()
    } else {
        "the capacity is in use".to_owned()
    }
}

/// Returns a clause about the GPUs of these obstacles: `GPU 3 is cordoned`, `the GPUs are cordoned`.
pub(super) fn verb_for(obstacles: &[(GpuIndex, Obstacle)], one: &str, several: &str) -> String {
    format!("{} {}", gpus_of(obstacles), if obstacles.len() == 1 { one } else { several })
}

fn gpus_of(obstacles: &[(GpuIndex, Obstacle)]) -> String {
    match obstacles {
        [(gpu, _)] => format!("GPU {gpu}"),
        _ => "the GPUs".to_owned(),
    }
}

/// Returns whether the request is for a replica, and the rule of the GPU allows only one.
fn has_one_replica(gpu: GpuIndex, wanted: &PlacementRequest, host: &Host) -> bool {
    let offer = host.gpus.iter().find(|one| one.index == gpu).and_then(|one| one.timeslice);
    wanted.share.kind() == LeaseKind::Timeslice && offer.is_some_and(|offer| offer.replicas == 1)
}

/// Returns whether the rule of the GPU requests MPS daemons for several users.
fn wants_many_users(gpu: GpuIndex, host: &Host) -> bool {
    let offers = host.gpus.iter().filter(|one| one.index == gpu).flat_map(|one| &one.mps);
    offers.into_iter().any(|offer| offer.wants_many_users)
}

/// Says why one GPU does not meet the request now.
pub(super) fn cause(gpu: GpuIndex, obstacle: Obstacle, wanted: &PlacementRequest, host: &Host) -> String {
    let count = wanted.count;
    if let Some(leases) = leases_at_limit(gpu, wanted, host).filter(|_| obstacle == Obstacle::InUse) {
        let leases = if leases == 1 { "1 lease".to_owned() } else { format!("{leases} leases") };
        return format!("GPU {gpu} has {leases}: `max_clients` of its rule allows no more");
    }
    match obstacle {
        Obstacle::Closed(Closed::Cordoned) => format!("GPU {gpu} is cordoned"),
        Obstacle::Closed(Closed::Claimed) => format!("an operation is changing GPU {gpu}"),
        Obstacle::Closed(Closed::Prohibited) => {
            format!("no program can use GPU {gpu}: its compute mode is PROHIBITED")
        }
        Obstacle::Closed(Closed::NotReady) => format!("GPU {gpu} is not ready"),
        Obstacle::Closed(Closed::Pending) => format!("GPU {gpu} still follows an earlier rule"),
        Obstacle::Closed(Closed::StillShared) => {
            format!("the MPS daemon of GPU {gpu} still runs, although the rule of the GPU no longer has mode `mps`")
        }
        Obstacle::Closed(Closed::NotShared) => {
            format!("the rule of GPU {gpu} has mode `mps`, but the MPS daemon of the GPU was not started")
        }
        Obstacle::InUse if is_reserved(gpu, wanted, host) => {
            format!("the free capacity of GPU {gpu} is reserved for earlier requests")
        }
        Obstacle::InUse if has_one_replica(gpu, wanted, host) => {
            format!("GPU {gpu} has one lease at a time, because `timeslice.replicas` of its rule is 1")
        }
        Obstacle::InUse => match wanted.targets {
            Some(_) => format!("the requested target on GPU {gpu} has no room"),
            None => format!("GPU {gpu} has no room"),
        },
        Obstacle::SharedThroughMps => format!("GPU {gpu} shares such a device through MPS: request it with --mps"),
        // The causes about leases and processes name the user.
        Obstacle::OtherUser(_) => {
            let why = match wants_many_users(gpu, host) {
                true => format!("although its rule has users = \"many\": `gpushctl mps show {gpu}` says why"),
                false => "(`mps.users` of its rule)".to_owned(),
            };
            format!("the MPS daemon of GPU {gpu} serves another user, and only one at a time {why}")
        }
        Obstacle::Partly(room) => format!("GPU {gpu} has room for only {room} of the {count} devices"),
    }
}
