//! One line of each format, and similar lines that report no step.

use super::*;

/// Lines that report a step, with its number.
const REPORTS: &[(&str, Option<u64>)] = &[
    // nanoGPT.
    ("iter 100: loss 2.5421, time 12.30ms, mfu 1.02%", Some(100)),
    ("iter 0: loss 10.9886, time 4012.00ms, mfu -100.00%", Some(0)),
    ("step 250: train loss 1.2034, val loss 1.3120", Some(250)),
    // Megatron, the last pipeline stage.
    (
        " iteration       10/     100 | consumed samples:          160 | elapsed time per iteration (ms): 512.1 | \
         learning rate: 1.5E-04 | global batch size:    16 | lm loss: 1.042712E+01 | loss scale: 1.0 | \
         grad norm: 2.110 | number of skipped iterations:   0 | number of nan iterations:   0 |",
        Some(10),
    ),
    // Hugging Face Trainer, old and new.
    ("{'loss': 2.3012, 'grad_norm': 1.2, 'learning_rate': 5e-05, 'epoch': 0.1}", None),
    ("{'loss': '2.301', 'grad_norm': '1.2', 'learning_rate': '5e-05', 'epoch': '0.1'}", None),
    ("{'train_runtime': 10.1, 'train_samples_per_second': 3.0, 'train_loss': 2.3, 'epoch': 1.0}", None),
    // tqdm.
    (" 10%|#         | 10/100 [00:05<00:45,  2.0it/s, loss=2.31]", Some(10)),
    ("  1%|▏         | 1/100 [00:05<08:15,  5.0s/it]", Some(1)),
    ("\r  0%|          | 0/100 [00:00<?, ?it/s]\r 10%|█         | 10/100 [00:05<00:45,  2.0it/s]", Some(10)),
    ("  0%|          | 0/3 [00:00<?, ?it/s]  33%|███▎      | 1/3 [00:01<00:02,  1.0s/it]", Some(1)),
    ("Training:  10%|█         | 10/100 [00:05<00:45,  2.0it/s]", Some(10)),
    ("Loading: 100%|██████████| 3/3 [00:01<00:00,  3.0it/s]\r  5%|▌ | 5/100 [00:01<00:19, 5.0it/s]", Some(5)),
    // Lightning.
    ("Epoch 0:  10%|█         | 10/100 [00:05<00:45,  2.0it/s, v_num=0, train_loss=2.310]", Some(10)),
    // torchtitan.
    (
        "[titan] 2026-01-01 10:00:00,123 - root - INFO - step:  1  loss:  8.1309  grad_norm: 1.4  memory:  0.9GiB",
        Some(1),
    ),
    ("[rank0]:\x1b[31mstep: 10  \x1b[32mloss:  7.1309  \x1b[33mmemory: 0.9GiB\x1b[39m", Some(10)),
    // MaxText.
    (
        "completed step: 10, seconds: 1.201, TFLOP/s/device: 12.1, Tokens/s/device: 100.1, total_weights: 8192, loss: 9.1",
        Some(10),
    ),
    // PyTorch's examples and tutorials.
    ("Train Epoch: 1 [640/60000 (1%)]\tLoss: 0.204512", None),
    ("Train Epoch: 1 [640/60000 (1%)] Loss: 0.204512", None),
    (
        "Epoch: [0][  10/5005]\tTime  0.5 ( 0.9)\tData  0.0 ( 0.3)\tLoss 6.9e+00 (7.0e+00)\tAcc@1 0.00",
        Some(10),
    ),
    ("loss: 2.303494  [   64/60000]", Some(64)),
    ("[1,  2000] loss: 2.188", Some(2000)),
    ("| epoch   1 |   200/ 2983 batches | lr 20.00 | ms/batch 15.21 | loss  7.63 | ppl  2060.12", None),
    // DeepSpeed.
    (
        "[2026-01-01 10:00:00,123] [INFO] [logging.py:128:log_dist] [Rank 0] step=10, skipped=0, lr=[0.001], mom=[(0.9, 0.999)]",
        Some(10),
    ),
    ("steps: 10 loss: 2.3012 iter time (s): 0.101 samples/sec: 158.1", Some(10)),
    // fairseq.
    (
        "2026-01-01 10:00:00 | INFO | train_inner | epoch 001:     10 / 100 loss=12.301, ppl=5012.1, num_updates=10, lr=1e-05",
        Some(10),
    ),
    (
        "{\"epoch\": 1, \"update\": 0.1, \"loss\": \"12.301\", \"num_updates\": \"10\", \"lr\": \"1e-05\"}",
        Some(10),
    ),
    // Keras.
    (" 10/100 [==>...........................] - ETA: 5s - loss: 2.3012 - accuracy: 0.1", Some(10)),
    ("10/100 ━━━━━━━━━━━━━━━━━━━━ 5s 10ms/step - accuracy: 0.1 - loss: 2.3012", Some(10)),
    // In general, and with what launchers put before.
    ("step 10 loss 2.3", Some(10)),
    ("epoch 3 step 100 loss=2.31", Some(100)),
    ("[rank0]: step 10 loss 2.3", Some(10)),
    ("2026-01-01T10:00:00.123Z [1,3]<stdout>: Step 10/100, Loss: tensor(2.3, device='cuda:0')", Some(10)),
    (
        "I0101 10:00:00.123456 1401 logging_writer.py:48] [10] accuracy=0.1, loss=2.301212, steps_per_second=2.1",
        Some(10),
    ),
    ("global_step: 10 | reduced_train_loss: 2.301 | train_step_timing in s: 1.2", Some(10)),
    ("step 10 done", Some(10)),
    ("step 10 took 0.51 s", Some(10)),
];

/// Lines that report none.
const SILENT: &[&str] = &[
    "",
    "hello",
    // Abnormal loss.
    "iter 100: loss nan, time 12.30ms, mfu 1.02%",
    " iteration       10/     100 | consumed samples:  160 | elapsed time per iteration (ms): 512.1 | lm loss: NAN | loss scale: 1.0 |",
    "{'loss': nan, 'grad_norm': 1.2, 'epoch': 0.1}",
    "{'loss': 'inf', 'epoch': '0.1'}",
    " 10%|#         | 10/100 [00:05<00:45,  2.0it/s, loss=nan]",
    "Epoch 0:  10%|█         | 10/100 [00:05<00:45,  2.0it/s, v_num=0, train_loss=-inf]",
    "step 10 loss tensor(nan, device='cuda:0')",
    "step 10 loss is nan, stopping",
    // No step is complete.
    "step 0: train loss 10.9886, val loss 10.9702",
    "  0%|          | 0/100 [00:00<?, ?it/s]",
    "{'eval_loss': 2.301, 'eval_runtime': 0.1, 'epoch': 1.0}",
    "Test: [ 10/100] Time 0.5 Loss 6.9e+00 Acc@1 0.00",
    "| end of epoch   1 | time: 10.21s | valid loss  5.03 | valid ppl 152.12",
    "Test set: Average loss: 0.0512, Accuracy: 9812/10000 (98%)",
    "step 10",
    "Starting epoch 3",
    // Bars that count other things.
    "Loading:  33%|███▎      | 1/3 [00:01<00:02,  1.0s/it]",
    "Loading checkpoint shards: 100%|██████████| 2/2 [00:01<00:00,  1.5it/s]",
    "[rank0]: Loading checkpoint shards:  50%|█████     | 1/2 [00:01<00:01,  1.5it/s]",
    "Downloading data: 100%|██████████| 10/10 [00:01<00:00, 9.1it/s]",
    "Map (num_proc=4):  10%|█         | 100/1000 [00:00<00:01, 900.0 examples/s]",
    "Tokenizing:  10%|█         | 100/1000 [00:00<00:01, 900.0it/s]",
    "Fetching 3 files:  33%|███▎      | 1/3 [00:01<00:02,  1.0s/it]",
    "model.safetensors: 100%|██████████| 548M/548M [00:05<00:00, 100MB/s]",
    "tokenizer.json:  50%|█████     | 1/2 [00:05<00:05,  1.0it/s]",
    "100%|██████████| 26/26 [00:00<00:00, 10.0kB/s]",
    "Sanity Checking DataLoader 0: 100%|██████████| 2/2 [00:00<00:00, 10.0it/s]",
    "Validation DataLoader 0:  50%|█████     | 1/2 [00:00<00:00, 10.0it/s]",
    // Errors, warnings, tracebacks.
    "RuntimeError: loss 5.0 at step 10 is too large",
    "ValueError: step 10: loss 2.3 differs",
    "Traceback (most recent call last):",
    "  File \"train.py\", line 10, in train_step",
    "    print(f\"step {step} loss {loss.item():.3f}\")",
    "[rank0]:     raise FloatingPointError(f\"loss {loss} at step {step}\")",
    "WARNING: loss spike at step 10: loss 8.2",
    "W0101 10:00:00.123456 1401 train.py:48] step 10 loss 8.2",
    "UserWarning: step 10, loss: 8.2",
    "step 10 failed after time 12.1",
    // Notes on the loss scale.
    "[deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 65536, reducing to 32768",
    "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 32768.0",
    "step 10: loss_scale: 65536",
    // Arguments and configuration.
    "num_steps: 100",
    "  max_steps ....................................... 100",
    "loss: cross_entropy",
    "  loss: 1.0",
    "Namespace(step=10, loss=2.0, epochs=3)",
    "TrainConfig(step=10, loss=2.0)",
    "step: 100, lr: 0.1, loss: cross_entropy",
    "loss_fn: 1, step: mse",
    // Values from a checkpoint.
    "Resuming from step 100, loss 2.3",
    "Loaded checkpoint of step 100 (loss 2.3012)",
    "=> loading checkpoint, epoch 3, loss 2.3",
    // Output of agents and schedulers.
    "srun: job 10 step 0 queued",
    "slurmstepd: error: *** STEP 10.0 ON n1 CANCELLED AT 2026-01-01T10:00:00 ***",
    "NCCL INFO Channel 10/16 : 0 1 2 3",
];

#[test]
fn each_format_reports_its_step() {
    for (line, step) in REPORTS {
        assert!(is_progress(line), "{line}");
        assert_eq!(step_of(line), *step, "{line}");
    }
}

#[test]
fn what_is_no_completed_step_stays_silent() {
    for line in SILENT {
        assert!(!is_progress(line), "{line}");
        assert_eq!(step_of(line), None, "{line}");
    }
}

#[test]
fn a_cleaned_line_is_read_like_the_raw_one() {
    let raw = "\r  0%|          | 0/100 [00:00<?, ?it/s]\r 10%|█         | 10/100 [00:05<00:45,  2.0it/s]";
    assert_eq!(step_of(&super::super::lines::clean(raw.as_bytes())), Some(10));
    let raw = "\x1b[31mstep: 10  \x1b[32mloss:  7.1309\x1b[39m";
    assert_eq!(step_of(&super::super::lines::clean(raw.as_bytes())), Some(10));
}

#[test]
fn any_text_is_read_without_a_panic() {
    for (line, _) in REPORTS {
        for end in (0..=line.len()).filter(|end| line.is_char_boundary(*end)) {
            is_progress(&line[..end]);
            is_progress(&line[end..]);
        }
    }
    let long = format!("{} step 10 loss 2.3", "é".repeat(9000));
    assert_eq!(step_of(&long), Some(10));
    assert!(!is_progress(&"%|".repeat(100_000)));
    assert!(!is_progress("step 99999999999999999999999 loss 2.3"));
}
