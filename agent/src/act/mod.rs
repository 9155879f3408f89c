//! Floor 2. Hands: processes are started, watched and stopped, their output is kept.

mod child;
pub mod devices;
pub mod doubt;
pub mod environment;
pub mod growth;
pub mod guardian;
pub mod hook;
pub mod log_files;
pub mod output;
pub mod page_files;
pub mod played;
pub mod port;
pub mod ranks;
pub mod reset;
pub mod rounds;
pub mod segment_file;
pub mod stop;
pub mod warm;
