"""The parameters, the plan and the report of each flow. Nothing here imports Prefect."""
