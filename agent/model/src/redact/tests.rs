use proptest::prelude::*;
use serde_json::json;

use super::*;

/// A random value, as tokens have after their prefix.
const RANDOM: &str = "wJ4lrXUtnF3Q7K7MDE9GbPxRfiCY9zL2mT5s";
/// A key of Weights & Biases, or a hash.
const HEX: &str = "3f786850e387550fdab836ed7e6dc881de23001b";

/// Each text with its secret between `«` and `»`; `$R` and `$H` are the values above.
const SECRETS: [(&str, &str); 82] = [
    ("a password of an option", "python train.py --password «hunter22» --lr 0.1"),
    ("a short password", "password=«abc»"),
    ("a numeric password", "password: «12345678»"),
    ("a quoted password with blanks", r#"connect(user="me", password="«two words»")"#),
    ("PGPASSWORD", "PGPASSWORD=«hunter2» psql"),
    ("MYSQL_PWD", "MYSQL_PWD=«hunter2»"),
    ("db_pass", "db_pass=«hunter2»"),
    ("a field pass", "{'user': 'me', 'pass': '«hunter2»'}"),
    ("a passphrase", "passphrase = «hunter2»"),
    ("an API key of the environment", "WANDB_API_KEY=«$H»"),
    ("a token of the environment", "HF_TOKEN=«abcdefgh»"),
    ("AWS, secret key", "AWS_SECRET_ACCESS_KEY=«wJalrXUtnFEMI/K7MDENG»"),
    ("AWS, session token", "aws_session_token = «$R//»"),
    ("AWS, key by form", "key «AKIAABCDEFGHIJKLMNOP» used"),
    ("an API key in JSON", r#"{"api_key": "«0123456789abcdef»"}"#),
    ("JSON in JSON", r#"body: "{\"api_key\": \"«0123456789abcdef»\"}""#),
    ("an item of the environment in Python", "os.environ['SERVICE_TOKEN'] = '«abcdefgh»'"),
    ("an option with an API key", "--api-key=«abcdef123»"),
    ("--wandb-key", "--wandb-key «shortkey»"),
    ("wandb.key", "train.py wandb.key=«shortkey»"),
    ("--key", "--key=«shortkey»"),
    ("a client secret", "clientSecret: «$R»"),
    ("private_key_id", r#""private_key_id": "«$H»""#),
    ("Hugging Face", "401 for «hf_$R» at"),
    ("Hugging Face, organization", "«api_org_$R»"),
    ("OpenAI", "«sk-proj-$R»"),
    ("Anthropic", "«sk-ant-api03-$R»"),
    ("Groq", "«gsk_$R»"),
    ("NVIDIA NGC", "«nvapi-$R»"),
    ("xAI", "«xai-$R»"),
    ("Replicate", "«r8_$R»"),
    ("Stripe", "«sk_live_$R»"),
    ("GitHub", "«ghp_$R»"),
    ("GitHub, fine grained", "«github_pat_$R»"),
    ("GitLab", "«glpat-$R»"),
    ("Slack", "«xoxb-1234567890-$R»"),
    ("Slack, app", "«xapp-1-$R»"),
    ("Slack, hook", "https://hooks.slack.com/services/«T000/B000/$R»"),
    ("Discord, hook", "https://discord.com/api/webhooks/«123/$R»"),
    ("Google, API key", "«AIza$R»"),
    ("Google, access token", "«ya29.$R»"),
    ("Google, client secret", "«GOCSPX-$R»"),
    ("Azure, client secret", "the client «abc8Q~$R» was refused"),
    ("Azure, storage", "AccountName=runs;AccountKey=«$R==»;EndpointSuffix=core.windows.net"),
    ("Azure, shared access", "https://a.blob.core.windows.net/c?sv=2024&sig=«$R%3D»&se=2026"),
    ("Azure, service bus", "SharedAccessKeyName=root;SharedAccessKey=«$R»"),
    ("Docker Hub", "«dckr_pat_$R»"),
    ("npm", "«npm_$R»"),
    ("PyPI", "«pypi-$R»"),
    ("SendGrid", "«SG.$R.$R»"),
    ("Databricks", "«dapi0123456789abcdef0123456789abcdef»"),
    ("Vault", "«hvs.$R»"),
    ("Grafana", "«glsa_$R»"),
    ("Telegram", "https://api.telegram.org/bot«12345678:$R/send»"),
    ("JSON web token", "jwt «eyJhbGciOiJIUzI1.eyJzdWIiOiIxMjM0.c2lnbmF0dXJl» expired"),
    ("JSON in Base64", "«eyJhcGlfYWRkcmVzcyI6Imh0dHBzOi8vYXBwLm5lcHR1bmUuYWkifQ==»"),
    ("Weights & Biases, key alone", "wandb: ERROR API key is invalid: «$H»"),
    ("Weights & Biases, login", "wandb login «$H»"),
    ("Bearer of a header", "Authorization: Bearer «abc.def-123456»"),
    ("Basic of a header", "authorization: basic «dXNlcjpwYXNz»"),
    ("a token of a header", "Authorization: Token «abc»"),
    ("another scheme of a header", "Authorization: «Digest username=me, response=abc»"),
    ("headers in Python", "{'Authorization': 'Bearer «abcdefghij»', 'Accept': '*/*'}"),
    ("Bearer without a header", "sent bearer «abcdefg12345»"),
    ("X-Api-Key", "X-Api-Key: «abcdef»"),
    ("a cookie", "Cookie: «session=abc; id=1»"),
    ("a cookie that is set", "< Set-Cookie: «sid=abc; Path=/»"),
    ("an address with user and password", "postgres://train:«hunter22»@db/runs"),
    ("an address without a user", "redis://:«pw»@cache:6379/0"),
    ("a password with an @", "https://me:«p@ss»@host/x"),
    ("a token in an address", "git clone https://«$R»@github.com/a/b"),
    ("a signed address of S3", "https://b.s3.amazonaws.com/k?X-Amz-Date=20261129&X-Amz-Signature=«$H$H»&x=1"),
    ("a signed address of GCS", "https://storage.googleapis.com/b/k?X-Goog-Signature=«$H»"),
    ("curl -u", "curl -u me:«hunter2» https://host"),
    (".netrc", "machine host login me password «hunter2»"),
    ("a colour between name and value", "password\u{1b}[0m=\u{1b}[31m«hunter22»\u{1b}[0m"),
    ("the value on the next line", "token:\n  «abcdefgh1»\nnext"),
    ("a private key", "«-----BEGIN RSA PRIVATE KEY-----»\n«MIIE»\n«-----END RSA PRIVATE KEY-----»\nnext"),
    ("a key of SSH that is cut off", "«-----BEGIN OPENSSH PRIVATE KEY-----»\n«b3Blbn»"),
    ("Base64 of an unknown option", "train.py --comet «$R» --lr 3"),
    ("hexadecimal digits of an unknown option", "train.py --comet «$H»"),
    ("an unknown short option", "train.py -t «$R»"),
];

/// Texts that are no secrets.
const ORDINARY: [&str; 48] = [
    "RuntimeError: token indices sequence length is longer than 1024",
    "tokens per second: 51233.7",
    "max_tokens=4096 num_tokens: 1024 pad_token_id=0 eos_token='</s>'",
    "--max-tokens 4096 --tokenizer meta-llama/Llama-3.1-8B",
    "the tokenizer was not found",
    "secret sauce of the optimizer",
    "the password is not known",
    "KeyError: 'model.layers.0.weight'",
    "KeyError: key=epoch_loss",
    "--sort-key name --image-key jpg --key-file /etc/ssl/key.pem",
    "primary_key=abcdef1234567890abcd",
    "password=None token=null api_key: none",
    "--password-file /run/secrets/password --token-file=/run/token",
    "pass 3 of 10, pass=3, pass: 4",
    "PWD=/home/user/train",
    "author: Jane, authority: 7",
    "received sig=SIGTERM, signal 15, sig=11",
    "NVRM: Xid (PCI:0000:3b:00): 79, pid=812, name=python, GPU has fallen off the bus.",
    "File \"/home/user/train.py\", line 12, in <module>",
    "commit 3f786850e387550fdab836ed7e6dc881de23001b",
    "HEAD is now at 3f786850e387550fdab836ed7e6dc881de23001b",
    "/data/hub/models--x/snapshots/3f786850e387550fdab836ed7e6dc881de23001b/config.json",
    "git+https://github.com/a/b@3f786850e387550fdab836ed7e6dc881de23001b",
    "3f786850e387550fdab836ed7e6dc881de23001b  model.safetensors",
    "--git-commit 3f786850e387550fdab836ed7e6dc881de23001b",
    "--revision=3f786850e387550fdab836ed7e6dc881de23001b",
    "sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
    "--image repo/train@sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
    "GPU-8f2c9d1e-4b7a-4c3d-9e8f-1a2b3c4d5e6f is unhealthy",
    "--device GPU-8f2c9d1e-4b7a-4c3d-9e8f-1a2b3c4d5e6f",
    "--world 8f2c9d1e-4b7a-4c3d-9e8f-1a2b3c4d5e6f",
    "--run-id 20261129T120000Z-a1b2c3d4e5f6a7b8c9d0",
    "--rdzv-id 0123456789abcdef0123456789abcdef",
    "--start 2026-11-29T12:00:00.000Z",
    "--pretrained Meta-Llama-3.1-70B-Instruct-FP8-v2",
    "--output /mnt/fs1/u4/a1B2c3D4e5F6g7H8i9J0k1/ckpt",
    "--log-to ./runs/a1B2c3D4e5F6g7H8i9J0k1",
    "--master trainer-7d9f8b6c5d-x2x9z",
    "--master gke-a3-mega-pool-7f3c9d21-x8k2",
    "--betas 0.9,0.95 --lr 3e-4 --eps 1e-08",
    "--seeds 12345678901234567890123",
    "--target transformers.models.llama.modeling_llama.LlamaForCausalLM",
    "http://10.0.0.1:2379,http://10.0.0.2:2379",
    "ssh://git@github.com/a/b, postgres://train@db/runs",
    "s3://bucket/path/to/object?versionId=3",
    "NCCL_SOCKET_IFNAME=eth0 CUDA_VISIBLE_DEVICES=0,1",
    "0000:3b:00.0 rank 3 of node-17 at step 12000",
    "the bearer of this message; a basic training of 3 steps",
];

fn filled(text: &str) -> String {
    text.replace("$R", RANDOM).replace("$H", HEX)
}

/// The text, and what must become of it.
fn case(text: &str) -> (String, String) {
    let text = filled(text);
    let mut masked = String::new();
    let mut rest = text.as_str();
    while let Some((before, secret)) = rest.split_once('«') {
        let (_, after) = secret.split_once('»').unwrap();
        masked.push_str(before);
        masked.push_str(COVER);
        rest = after;
    }
    masked.push_str(rest);
    (text.replace(['«', '»'], ""), masked)
}

#[test]
fn secrets_of_each_kind_are_masked() {
    let wrong: Vec<String> = SECRETS
        .iter()
        .map(|(kind, text)| (kind, case(text)))
        .filter(|(_, (text, expected))| mask(text) != *expected)
        .map(|(kind, (text, expected))| format!("{kind}: {:?} in place of {expected:?}", mask(&text)))
        .collect();
    assert!(wrong.is_empty(), "{} of {}:\n{}", wrong.len(), SECRETS.len(), wrong.join("\n"));
}

#[test]
fn ordinary_text_is_kept() {
    let wrong: Vec<String> = ORDINARY
        .iter()
        .filter(|text| mask(text) != **text)
        .map(|text| format!("{text:?}: {:?}", mask(text)))
        .collect();
    assert!(wrong.is_empty(), "{} of {}:\n{}", wrong.len(), ORDINARY.len(), wrong.join("\n"));
}

#[test]
fn secrets_of_each_kind_are_masked_in_json_too() {
    for (kind, text) in SECRETS {
        let (text, expected) = case(text);
        let (mut value, mut lines) =
            (json!({ "message": text }), json!({ "tail": text.lines().collect::<Vec<_>>() }));
        mask_json(&mut value);
        mask_json(&mut lines);
        assert_eq!(value["message"], json!(expected), "{kind}");
        assert_eq!(lines["tail"], json!(expected.lines().collect::<Vec<_>>()), "{kind}");
    }
}

#[test]
fn values_of_options_are_masked_on_a_command_line() {
    let check = |line: &[&str], expected: &[&str]| {
        let mut value = json!({ "command": line });
        mask_json(&mut value);
        assert_eq!(value["command"], json!(expected));
    };
    check(
        &["train.py", "--wandb-token", "shortone", "--lr", "0.1", "--api-key=abcdef123"],
        &["train.py", "--wandb-token", "<masked>", "--lr", "0.1", "--api-key=<masked>"],
    );
    check(
        &["train.py", "-t", RANDOM, "logger.any=wJ4lrXUtnF3Q7K7MDE9GbPxRfiCY9zL2mT5s", "--user", "me:pw"],
        &["train.py", "-t", "<masked>", "logger.any=<masked>", "--user", "me:<masked>"],
    );
    check(
        &["train.py", "--password", "two words", "--resume"],
        &["train.py", "--password", "<masked>", "--resume"],
    );
}

#[test]
fn fields_with_the_name_of_a_secret_are_masked() {
    let mut value = json!({ "values": { "password": "abc", "uid": "7", "token": "abcd", "api_key": "x" } });
    mask_json(&mut value);
    let masked = json!({ "password": COVER, "uid": "7", "token": COVER, "api_key": COVER });
    assert_eq!(value["values"], masked);
}

proptest! {
    #[test]
    fn masking_is_idempotent_and_keeps_lines(
        text in prop::collection::vec(prop_oneof!["\\PC{0,20}", "\n", select_secret()], 0..6)
    ) {
        let text = text.concat();
        let once = mask(&text);
        prop_assert_eq!(once.matches('\n').count(), text.matches('\n').count());
        prop_assert_eq!(mask(&once), once);
    }
}

fn select_secret() -> impl Strategy<Value = String> {
    prop::sample::select(SECRETS.map(|(_, text)| case(text).0).to_vec())
}
