//! `mainstay version`.

use std::process::ExitCode;

use mainstay_coord::group::values;
use mainstay_group::wire;
use mainstay_proto::json::SCHEMA_VERSION;
use mainstay_sys::c_library;
use mainstay_tier::peer::frame;
use serde_json::{Value, json};

use super::output::Form;
use super::{exit, output};

/// The commit that was built, as `cargo xtask dist` sets it; none for a build without it.
const COMMIT: Option<&str> = option_env!("MAINSTAY_COMMIT");

/// Print the version of this program, and the API and protocols that it speaks
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  mainstay version\n  mainstay version --json | jq -r .version")]
pub(super) struct Args {
    #[command(flatten)]
    form: Form,
}

/// What it speaks, by the names of `--json`.
fn protocols() -> [(&'static str, String); 6] {
    let page = format!("{}.{}", mainstay_heartbeat::MAJOR, mainstay_heartbeat::MINOR);
    [
        ("api", "mainstay.v1".to_owned()),
        ("heartbeat_page", page),
        ("launchers", wire::PROTOCOL.to_string()),
        ("coordination", values::VERSION.to_string()),
        ("checkpoint_peers", frame::VERSION.to_string()),
        ("json", SCHEMA_VERSION.to_string()),
    ]
}

pub(super) async fn run(args: Args) -> anyhow::Result<ExitCode> {
    let version = env!("CARGO_PKG_VERSION");
    let glibc = c_library::version();
    let text = match args.form.structured() {
        Some(form) => {
            let protocols: serde_json::Map<String, Value> =
                protocols().into_iter().map(|(name, of)| (name.to_owned(), of.into())).collect();
            let mut document = json!({ "version": version, "api": "mainstay.v1", "protocols": protocols });
            for (name, value) in [("commit", COMMIT), ("glibc", glibc.as_deref())] {
                if let Some(value) = value {
                    document[name] = value.into();
                }
            }
            form.document(document)
        }
        None => {
            let mut text = format!("mainstay {version}\n");
            text.push_str(&format!("commit            {}\n", COMMIT.unwrap_or("unknown: not a release")));
            text.push_str(&format!("glibc             {}\n", glibc.as_deref().unwrap_or("none")));
            protocols().iter().for_each(|(name, of)| text.push_str(&format!("{name:<16}  {of}\n")));
            text
        }
    };
    output::print(&text)?;
    Ok(ExitCode::from(exit::OK))
}
