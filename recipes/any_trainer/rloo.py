"""Train RLOO with TRL. The rows of a group share their prompt; one line differs from grpo.py.

make fit && python recipes/any_trainer/rloo.py            # on the demo's chats and starting model
python recipes/any_trainer/rloo.py --model Qwen/Qwen3-0.6B --train_file chats.jsonl --learning_rate 1e-6
"""

from grpo import train
from trl import RLOOConfig, RLOOTrainer

if __name__ == "__main__":
    train(RLOOTrainer, RLOOConfig)  # <- was GRPOTrainer, GRPOConfig
