//! `gpushctl status`.

use gpush_api::{Gpu, HealthStatus};
use gpush_client::Client;

use crate::{
    args::StatusArgs,
    exit::{Failure, Outcome},
    output::Output,
    render::{
        Appearance,
        status::{Status, status, status_with_sensors},
        summary,
    },
};

pub(super) async fn run(client: &mut Client, args: &StatusArgs, out: &Output) -> Outcome {
    let (shown, code) = read(client, args.summary, &args.which.selectors(), out).await?;
    out.show(&shown, |look| draw(&shown, args, out.is_wide(), look))?;
    Ok(code)
}

fn draw(shown: &Status, args: &StatusArgs, with_sensors: bool, look: &Appearance) -> String {
    if args.summary {
        summary::summary(shown, look)
    } else if with_sensors {
        status_with_sensors(shown, args.brief, look)
    } else {
        status(shown, args.brief, look)
    }
}

/// Reads the status of the selected GPUs. Also returns the exit status.
pub(super) async fn read(
    client: &mut Client,
    profiles: bool,
    selectors: &[String],
    out: &Output,
) -> Result<(Status, u8), Failure> {
    let version = client.version().await?;
    let health = client.health().await?;
    let mut code = 0;
    let gpus = match client.gpus(profiles).await {
        Ok(gpus) => match super::select_of(client, gpus.clone(), selectors).await {
            Ok(gpus) => gpus,
            // The driver cannot identify one of the GPUs. Show the others; health contains the error.
            Err(failure) => match failure {
                Failure::Error(error)
                    if health.errors.iter().any(|known| known.message == error.message)
                        && !named_of(&gpus, selectors).is_empty() =>
                {
                    code = error.code.exit_status();
                    named_of(&gpus, selectors)
                }
                other => return Err(other),
            },
        },
        // There is no driver, or the host is in maintenance. Show no GPUs; health contains the error.
        Err(error)
            if health.status == HealthStatus::Degraded && health.errors.iter().any(|c| c.code == error.code()) =>
        {
            // Maintenance is not an error, because an administrator has requested it.
            let code = if health.maintenance.is_some() { 0 } else { error.code().exit_status() };
            return Ok((Status::without_gpus(version, health), code));
        }
        Err(error) => return Err(Failure::from(error)),
    };
    let mps = super::mps::of(client, &gpus, out).await;
    let leases = super::lease::of(client, &gpus, out).await;
    let devices = super::mig::devices(client, &gpus, &mps, &leases, out).await;
    Ok((Status { version, health, gpus, devices, mps, leases }, code))
}

/// Returns the GPUs that match a selector. Ignores selectors that match no GPU.
fn named_of(gpus: &[Gpu], selectors: &[String]) -> Vec<Gpu> {
    let words = selectors.iter().flat_map(|text| text.split(','));
    let found: Vec<Gpu> =
        words.flat_map(|word| super::select(gpus.to_vec(), &[word.to_owned()]).unwrap_or_default()).collect();
    gpus.iter().filter(|gpu| found.iter().any(|one| one.uuid == gpu.uuid)).cloned().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::render::fixtures;
    use gpush_api::GpuIndex;

    #[test]
    fn gpus_that_are_listed_are_shown_without_an_absent_one() {
        let gpus = fixtures::mixed();
        let indexes = |selectors: &[&str]| -> Vec<GpuIndex> {
            let selectors: Vec<String> = selectors.iter().map(|one| (*one).to_owned()).collect();
            named_of(&gpus, &selectors).iter().map(|gpu| gpu.index).collect()
        };
        assert_eq!(indexes(&["0,99"]), [0]);
        assert_eq!(indexes(&["99", "1", "0", "1"]), [0, 1]);
        assert!(indexes(&["99"]).is_empty());
    }
}
