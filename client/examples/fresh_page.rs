//! Makes a fresh page, for trying a client without a launcher: `fresh_page <path>`.

use std::error::Error;

use mainstay_heartbeat::{PageSpec, format};

fn main() -> Result<(), Box<dyn Error>> {
    let path = std::env::args_os().nth(1).ok_or("usage: fresh_page <path>")?;
    let spec = PageSpec {
        job: "try",
        rank: 0,
        local_rank: 0,
        world_size: 1,
        attempt: 0,
        boot_id: [0; 16],
        creator_pid: std::process::id(),
        created_mono_ns: 0,
    };
    // Written aside and renamed, as a launcher does: no process sees a page that is not whole.
    let mut aside = path.clone();
    aside.push(".new");
    std::fs::write(&aside, format(&spec))?;
    std::fs::rename(&aside, &path)?;
    Ok(())
}
