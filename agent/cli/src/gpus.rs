//! `mainstay gpus`: one line per device.

use std::fmt::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use mainstay_proto::json::ApiEnum;
use mainstay_proto::v1::{Device, HealthState, ListDevicesResponse, RecommendedAction, ServerMode};
use serde_json::{Value, json};

use super::client::{AskError, Client};
use super::find::{AskAny, find};
use super::output::{self, Form, Paint, aligned, clean};
use super::{exit, order, status};

/// Show the host's GPUs, one line each.
#[derive(Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
#[command(after_help = "Examples:
  mainstay gpus                                             all GPUs that the agent watches
  mainstay gpus --json | jq '.devices[] | select(.state != \"HEALTHY\")'

Exit status: 0 all are healthy, 1 one is degraded, 2 one is unhealthy, 3 no agent answers, there is no GPU
or the state of one is unknown, 64 the command line was not understood.")]
pub(super) struct Args {
    #[command(flatten)]
    ask: AskAny,
    #[command(subcommand)]
    order: Option<Order>,
}

#[derive(Debug, clap::Subcommand)]
enum Order {
    Reset(Reset),
}

/// Reset an idle GPU, where the agent's configuration allows it (gpu.reset.mode), and see whether that helped
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  mainstay gpus reset gpu.0000:3b:00 --reason \"XID 48, ticket 4711\"

Root, the agent's user and operators (operator_uids, operator_gids) may reset GPUs. The journal records who, why and the result.
Exit status: 0 reset and healthy, 3 refused, not fixed by the reset, or no agent answers,
64 the command line was not understood.")]
struct Reset {
    /// The GPU: its component as `mainstay status` names it, its PCI address or its UUID
    gpu: String,
    /// Reason; stored in the journal with the user
    #[arg(long, value_name = "TEXT")]
    reason: String,
    /// Ask the agent on this socket, and no other
    #[arg(long, value_name = "PATH", env = "MAINSTAY_SOCKET")]
    socket: Option<PathBuf>,
}

async fn reset(args: Reset) -> anyhow::Result<ExitCode> {
    let response = async { order::agent(args.socket).await?.reset_gpu(&args.gpu, &args.reason).await };
    order::done(response.await, &format!("{}: reset, healthy\n", args.gpu))
}

pub(super) async fn run(args: Args) -> anyhow::Result<ExitCode> {
    if let Some(Order::Reset(args)) = args.order {
        return reset(args).await;
    }
    let found = find(args.ask.server.named());
    let mut problem = None;
    for place in &found.places {
        match ask(&place.socket).await {
            // A launcher does not monitor devices.
            Ok(answer)
                if answer.server.as_ref().is_some_and(|server| server.mode() == ServerMode::Launcher) => {}
            Ok(answer) => return show(&answer, args.ask.form),
            Err(error) => problem = Some(error),
        }
    }
    if let Some(form) = args.ask.form.structured() {
        let empty = ListDevicesResponse::default();
        output::print(&form.document(as_json(&empty)))?;
    }
    output::note(&match problem {
        Some(error) => clean(&error.to_string()),
        None => status::nothing_answers(&found),
    });
    Ok(ExitCode::from(exit::UNKNOWN))
}

async fn ask(socket: &std::path::Path) -> Result<ListDevicesResponse, AskError> {
    Client::connect(socket).await?.devices().await
}

fn show(answer: &ListDevicesResponse, form: Form) -> anyhow::Result<ExitCode> {
    if let Some(form) = form.structured() {
        output::print(&form.document(as_json(answer)))?;
    } else {
        output::print(&render(&answer.devices, Paint::for_stdout()))?;
        if answer.devices.is_empty() {
            output::note("no GPU is known here; `mainstay status` shows what gpu.driver says");
        }
    }
    Ok(ExitCode::from(weigh(&answer.devices)))
}

fn weigh(devices: &[Device]) -> u8 {
    let severity = |device: &Device| match device.state() {
        HealthState::Healthy => (0, exit::OK),
        HealthState::Unknown | HealthState::Unspecified => (1, exit::UNKNOWN),
        HealthState::Degraded => (2, exit::DEGRADED),
        HealthState::Unhealthy => (3, exit::UNHEALTHY),
    };
    devices.iter().map(severity).max().map_or(exit::UNKNOWN, |(_, status)| status)
}

const HEADER: [&str; 12] =
    ["GPU", "PCI", "STATE", "TEMP", "POWER", "BUSY", "MEMORY", "ECC", "LINKS", "PROCS", "MODEL", "UUID"];

/// One line for each device, and another below it for problems.
pub(super) fn render(devices: &[Device], paint: Paint) -> String {
    let header = HEADER.map(str::to_owned);
    let rows: Vec<[String; 12]> = std::iter::once(header).chain(devices.iter().map(cells)).collect();
    let lines = aligned(&rows, |column| matches!(column, 1 | 2 | 10 | 11), None);
    let mut screen = String::new();
    for (place, text) in lines.iter().enumerate().filter(|_| !devices.is_empty()) {
        let device = place.checked_sub(1).map(|place| &devices[place]);
        let text = match device.map(Device::state) {
            None => paint.dim(text),
            Some(state) => text.replacen(state.name(), &paint.state(state, state.name()), 1),
        };
        let _ = writeln!(screen, "{text}");
        if let Some(device) = device.filter(|device| device.state() != HealthState::Healthy) {
            let action = device.recommended_action().name();
            let needed = match device.recommended_action() {
                RecommendedAction::None | RecommendedAction::Unspecified => String::new(),
                _ => format!("  {}", paint.warning(action)),
            };
            let _ = writeln!(screen, "     {}{needed}", clean(&device.reason));
        }
        for note in device.iter().flat_map(|device| &device.notes) {
            let _ = writeln!(screen, "     {}", paint.dim(&format!("note: {}", clean(note))));
        }
    }
    screen
}

fn cells(device: &Device) -> [String; 12] {
    let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
    let gib = |bytes: u64| bytes as f64 / f64::from(1 << 30);
    let power = device.power.map(|watts| match device.power_limit {
        Some(limit) => format!("{watts:.0}/{limit:.0} W"),
        None => format!("{watts:.0} W"),
    });
    let memory = device.memory_used.zip(device.memory_total);
    let links = device.links_up.zip(device.links_expected);
    let known = device.read_age.is_some();
    [
        or_dash(device.index.map(|index| index.to_string())),
        clean(&device.pci_address),
        device.state().name().to_owned(),
        or_dash(device.temperature.map(|degrees| format!("{degrees} °C"))),
        or_dash(power),
        or_dash(device.utilization.map(|percent| format!("{percent} %"))),
        or_dash(memory.map(|(used, total)| format!("{:.1}/{:.0} GiB", gib(used), gib(total)))),
        or_dash(device.ecc_uncorrected.map(|errors| errors.to_string())),
        or_dash(links.map(|(up, expected)| format!("{up}/{expected}"))),
        or_dash(known.then(|| device.processes.len().to_string())),
        clean(&device.model),
        clean(&device.uuid),
    ]
}

fn as_json(answer: &ListDevicesResponse) -> Value {
    json!({
        "exit_status": weigh(&answer.devices),
        "server": answer.server,
        "devices": answer.devices,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn devices() -> Vec<Device> {
        let well = Device {
            index: Some(0),
            pci_address: "0000:3b:00".into(),
            model: "NVIDIA H100".into(),
            uuid: "GPU-0".into(),
            state: HealthState::Healthy.into(),
            reason: "fine".into(),
            temperature: Some(61),
            power: Some(650.4),
            power_limit: Some(700.0),
            utilization: Some(99),
            memory_used: Some(70 << 30),
            memory_total: Some(80 << 30),
            ecc_uncorrected: Some(0),
            links_up: Some(18),
            links_expected: Some(18),
            read_age: Some(prost_types::Duration::default()),
            ..Device::default()
        };
        let lost = Device {
            index: Some(1),
            pci_address: "0000:4b:00".into(),
            state: HealthState::Unhealthy.into(),
            reason: "the driver \x1b[31mlost it".into(),
            recommended_action: RecommendedAction::RebootNode.into(),
            ..Device::default()
        };
        vec![well, lost]
    }

    #[test]
    fn each_gpu_has_a_line_and_what_is_wrong_one_more() {
        let screen = render(&devices(), Paint::plain());
        let lines: Vec<&str> = screen.lines().collect();
        assert_eq!(lines.len(), 4, "{screen}");
        assert!(
            lines[1].contains("61 °C  650/700 W  99 %  70.0/80 GiB    0  18/18      0  NVIDIA H100"),
            "{screen}"
        );
        assert!(lines[2].contains("0000:4b:00  UNHEALTHY") && lines[2].contains(" - "), "{screen}");
        assert!(lines[3].ends_with("lost it  REBOOT_NODE") && !lines[3].contains('\x1b'), "{screen}");
        assert_eq!(render(&[], Paint::plain()), "");
    }

    #[test]
    fn the_exit_status_is_that_of_the_heaviest() {
        let mut devices = devices();
        assert_eq!(weigh(&devices), exit::UNHEALTHY);
        devices.pop();
        assert_eq!(weigh(&devices), exit::OK);
        assert_eq!(weigh(&[]), exit::UNKNOWN);
        assert_eq!(as_json(&ListDevicesResponse::default())["exit_status"], 3);
    }
}
