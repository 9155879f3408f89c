//! `mainstay check --history`: the failures of jobs that implicated this host, as its agent counts them.

use std::fmt::Write;
use std::process::ExitCode;

use mainstay_group::round::AVOIDED_FROM;
use mainstay_model::time::Wall;
use mainstay_view::convert::wall;
use serde_json::json;

use super::Args;
use crate::client::Client;
use crate::find::find;
use crate::{exit, output};

pub(super) async fn show(args: &Args) -> anyhow::Result<ExitCode> {
    let agents = find(args.ask.socket.as_deref()).places.into_iter().filter(|place| place.job.is_none());
    for place in agents {
        let Ok(client) = Client::connect(&place.socket).await else { continue };
        let Ok(snapshot) = client.snapshot().await else { continue };
        let times: Vec<Wall> =
            snapshot.node.implicated.iter().filter_map(|of| of.time.as_ref().map(wall)).collect();
        output::print(&match args.ask.form.structured() {
            Some(form) => form.document(json!({
                "implicated": times.iter().map(Wall::to_string).collect::<Vec<String>>(),
                "avoided": is_avoided(&times),
            })),
            None => text(&times),
        })?;
        return Ok(ExitCode::SUCCESS);
    }
    output::note("no agent answers, and only an agent keeps the history of its host");
    Ok(ExitCode::from(exit::UNKNOWN))
}

fn is_avoided(times: &[Wall]) -> bool {
    times.len() >= AVOIDED_FROM as usize
}

fn text(times: &[Wall]) -> String {
    let mut text = match times.len() {
        0 => "no failure".to_owned(),
        1 => "1 failure".to_owned(),
        more => format!("{more} failures"),
    };
    text.push_str(" of hardware or platform implicated this host in the last 14 days\n");
    for at in times {
        let _ = writeln!(text, "  {at}");
    }
    if is_avoided(times) {
        text.push_str("jobs of several hosts avoid it while another host is free\n");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_failures_and_the_host_is_avoided() {
        let at = |day: i64| Wall(1_795_492_212_000_000_000 + day * 86_400_000_000_000);
        testing::snapshot!("check", "history: none", text(&[]));
        testing::snapshot!("check", "history: one", text(&[at(0)]));
        testing::snapshot!("check", "history: two", text(&[at(0), at(1)]));
    }
}
