//! Messages about this server and its checkpoints; those about the host and its jobs are `mainstay_view::convert`.

pub(super) mod checkpoint;

use mainstay_model::time::Stamp;
use mainstay_proto::v1;
use mainstay_view::convert::timestamp;

use crate::{Mode, ServerInfo};

pub(crate) fn server(about: &ServerInfo, journal_error: Option<&str>, now: Stamp) -> v1::Server {
    let mode = match about.mode {
        Mode::Agent => v1::ServerMode::Agent,
        Mode::Launcher => v1::ServerMode::Launcher,
    };
    v1::Server {
        mode: mode.into(),
        version: about.version.clone(),
        pid: about.pid.0.into(),
        start_time: Some(timestamp(about.started.wall)),
        hostname: about.hostname.clone(),
        boot_id: about.boot_id.0.clone(),
        time: Some(timestamp(now.wall)),
        journal_error: journal_error.map(str::to_owned),
    }
}
